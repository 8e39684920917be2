"""What is made of a run's records: the summary, JSON lines, plain lines, the picture and the report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from liveweight.cli.demo.terminal_picture import TerminalPicture, sparkline
from liveweight.cli.demo.view import print_json, print_line
from liveweight.errors import Refused
from liveweight.lab.demo.records import STAGES, Phase, Record, StepReached, Warmed, percentile
from liveweight.lab.demo.report.page import page, write_report
from liveweight.lab.demo.report.scale import Scale
from tests.support.demo_records import SETTINGS, outcome

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """A page's elements, by id and in order. Raises for one that is closed wrongly or says an id twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.ids: dict[str, dict[str, str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        assert found.get("id") not in self.ids
        if "id" in found:
            self.ids[found["id"]] = found
        self.elements.append((tag, found))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def figures(self) -> dict[str, str]:
        return {
            found["data-figure"]: found["data-value"] for _, found in self.elements if "data-figure" in found
        }

    def count(self, class_: str) -> int:
        return sum(found.get("class") == class_ for _, found in self.elements)


def test_the_summary_has_both_runs_numbers() -> None:
    summary = outcome(faults=True).summary
    assert (summary.steps, summary.rounds, summary.rounds_failed, summary.faults_survived) == (12, 12, 1, 1)
    assert summary.reward_first == pytest.approx(1 / 12)
    assert summary.reward_last == pytest.approx(sum(range(3, 13)) / 10 / 12)
    assert summary.control_reward_first == summary.control_reward_last == pytest.approx(0.1)
    assert (summary.stall_ms_p50, summary.stall_ms_p99) == (3.0, 6.0)
    assert (summary.crossed, summary.dropped, summary.staleness_worst) == (36, 12, 2)
    assert summary.gap_worst == pytest.approx(1.2e-6)
    assert summary.gap_after_worst == 3e-7
    assert summary.published_bytes == 12 * 2001
    assert outcome(control=False).summary.control_reward_last is None


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0), (0.01, 1.0)]
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected
    assert percentile([], share) == 0.0


def records() -> list[Record]:
    done = outcome(faults=True)
    early: list[Record] = [
        Phase(at_s=0.0, name="start", detail="1 x serve"),
        Warmed(at_s=1.0, step=5, steps=5, loss=1.25),
        *(StepReached(at_s=2.0, version=1, replica=0, stage=stage, took_ms=3.0) for stage in STAGES),
    ]
    return [*early, *done.steps, Phase(at_s=9.0, name="end"), done.summary]


def test_json_is_an_object_per_step_and_the_summary_last(capsys: pytest.CaptureFixture[str]) -> None:
    for record in records():
        print_json(record)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["run"], line["step"]) for line in lines[:-1]] == [
        (run, number) for run in ("live", "control") for number in range(1, 13)
    ]
    named = {"reward_first", "reward_last", "rounds", "stall_ms_p50", "stall_ms_p99", "faults_survived"}
    assert named <= lines[-1].keys()
    assert lines[4]["faults"][0]["kind"] == "cut"


def test_lines_tell_every_step_and_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    for record in records():
        print_line(record)
    said = capsys.readouterr().out
    assert said.count("live   ") == said.count("control ") - 1 == 12
    assert "survived: a <connection> was cut; back after 1.5 s" in said
    assert "reward     0.08 -> 0.62" in said


def test_the_picture_shows_the_latest_records() -> None:
    picture, console = TerminalPicture(SETTINGS), Console(width=110, record=True, file=io.StringIO())
    console.print(picture.draw())  # before anything is known
    for record in records():
        picture.on_record(record)
    console.print(picture.draw())
    shown = console.export_text()
    for expected in (
        "done",
        "staleness 1.0 (worst 2)",
        "100 tokens/s",
        "commit",
        "faults     1 survived",
    ):
        assert expected in shown


def test_a_sparkline_keeps_its_width_and_its_ends() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == " █"
    assert len(sparkline([0.5] * 1000, width=60)) <= 60


def test_the_report_has_the_runs_figures() -> None:
    done = outcome(faults=True)
    text = page(done, SETTINGS)
    found = Page(text)
    summary = asdict(done.summary)
    assert {name: float(value) for name, value in found.figures().items()} == {
        name: pytest.approx(summary[name]) for name in found.figures()
    }
    assert {"reward_first", "reward_last", "control_reward_last", "stall_ms_p99", "faults_survived"} <= set(
        found.figures()
    )
    live = [float(value) for value in found.ids["reward-live"]["data-values"].split()]
    assert live == pytest.approx([step.reward for step in done.steps if step.run == "live"], abs=1e-5)
    assert len(found.ids["reward-control"]["data-values"].split()) == 12
    assert len(found.ids["gap-all"]["points"].split()) == 12
    embedded = re.search(r'id="summary">(.*?)</script>', text)
    assert embedded is not None
    assert json.loads(embedded[1]) == summary


def test_the_report_draws_every_round_on_every_rank_and_every_stall_once() -> None:
    found = Page(page(outcome(faults=True), SETTINGS))
    assert (found.count("round"), found.count("failed"), found.count("fault")) == (12 * 2, 1, 1)
    bars = [int(each["data-count"]) for _, each in found.elements if each.get("class") == "bar"]
    assert (len(bars), sum(bars)) == (16, 12)
    assert found.ids["faults"]["data-count"] == "1"


def test_the_report_needs_nothing_else_and_says_in_words_what_it_draws() -> None:
    text = page(outcome(control=False), SETTINGS)
    found = Page(text)
    assert re.findall(r"(?:src|href)=\"(?!data:)", text) == []
    assert "@import" not in text
    assert "url(" not in text
    charts = [each for name, each in found.elements if name == "svg"]
    assert len(charts) == 5
    assert all(each["role"] == "img" and each["aria-labelledby"].split()[1] in found.ids for each in charts)
    assert found.figures()["control_reward_last"] == ""
    assert "prefers-color-scheme: dark" in text


def test_a_report_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    assert write_report(tmp_path / "new" / "report", outcome(), SETTINGS).read_text().startswith("<!DOCTYPE")
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="file"):
        write_report(tmp_path / "file", outcome(), SETTINGS)


@pytest.mark.parametrize("log", [False, True])
def test_values_lie_between_both_ends_and_so_do_ticks(log: bool) -> None:
    scale = Scale(low=1e-8 if log else 0.0, high=1.0, begin=100, end=0, log=log)
    assert (scale(scale.low), scale(1.0), scale(5.0), scale(-1.0)) == (100, 0, 0, 100)
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks())
    assert len(scale.ticks()) >= 3
