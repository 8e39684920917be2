"""A short demo from end to end, and its report in a real browser: what is laid out and drawn is what the run's JSON says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.chromium import measured
from tests.support.processes.demo_processes import demo, files_left, lines_of, processes_left

pytestmark = pytest.mark.timeout(600)

LOOK = """
const place = (one) => { const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; };
const screen = (one, x, y) => { const at = new DOMPoint(x, y).matrixTransform(one.getScreenCTM()); return [at.x, at.y]; };
const points = (id) => { const one = document.getElementById(id);
  return one === null ? [] : Array.from(one.points).map((point) => screen(one, point.x, point.y)); };
const chart = document.getElementById("reward");
return {
  figures: Object.fromEntries(Array.from(document.querySelectorAll("[data-figure]"), (one) => [one.dataset.figure, one.dataset.value])),
  shown: Object.fromEntries(Array.from(document.querySelectorAll("[data-figure]"), (one) => [one.dataset.figure, one.innerText])),
  reward: points("reward-live"), control: points("reward-control"), gap: points("gap-all"),
  ends: [screen(chart, 0, 220)[1], screen(chart, 0, 16)[1]],
  bars: Array.from(document.querySelectorAll("#stalls .bar"), (one) => [Number(one.dataset.count), place(one)[3]]),
  rounds: Array.from(document.querySelectorAll("#timeline .round"), (one) => [Number(one.dataset.version), place(one)[1]]),
  charts: Array.from(document.querySelectorAll("svg"), place),
  width: [document.documentElement.scrollWidth, window.innerWidth],
  asked: performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !name.startsWith("data:")),
};
"""


SUMMARY = {
    *("reward_first", "reward_last", "rounds", "stall_ms_p50", "stall_ms_p99", "faults_survived"),
    *("control_reward_first", "control_reward_last"),
}


@dataclass(frozen=True)
class Ended:
    """A demo that has ended: its report, its JSON, and what it left in the directory of its temporary files and of processes."""

    page: Path
    said: list[dict[str, Any]]
    left: tuple[list[Path], list[int]]


@pytest.fixture(scope="module")
def run() -> Iterator[Ended]:
    """A short demo."""
    with (
        tempfile.TemporaryDirectory(prefix="lw-") as temporary,
        tempfile.TemporaryDirectory(prefix="lw-") as out,
    ):
        place = Path(temporary)
        with demo(place, "--steps", "3", "--json", "--out", out) as started:
            said = lines_of(started)
        yield Ended(Path(out) / "index.html", said, (files_left(place), processes_left(place)))


@pytest.fixture(scope="module")
def found(run: Ended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser makes of its page."""
    seen: dict[str, Any] = measured(run.page, LOOK, tmp_path_factory.mktemp("page"))
    return seen


def test_a_short_demo_from_end_to_end(run: Ended) -> None:
    *steps, summary = run.said
    assert [(step["run"], step["step"]) for step in steps] == [
        (name, number) for name in ("live", "control") for number in (1, 2, 3)
    ]
    assert summary.keys() >= SUMMARY
    assert summary["reward_first"] < 0.2
    live, control = steps[:3], steps[3:]
    assert summary["rounds"] == 4  # the warm-up and three steps
    versions = [one["version"] for step in live for one in step["rounds"]]
    assert versions == [0, 1, 2, 3]
    ranks = [part["ranks"] for step in live for one in step["rounds"] for part in one["replicas"]]
    assert all([rank["rank"] for rank in own] == [0, 1] for own in ranks)
    assert all(step["rounds"] == [] for step in control)
    assert [step["staleness_worst"] for step in control] == [0, 1, 2]
    assert all(step["staleness_worst"] <= 2 for step in live)
    assert summary["gap_worst"] < 1e-4
    assert sum(step["gap"]["tokens"] for step in live) > 0
    assert "<!DOCTYPE html>" in run.page.read_text()
    assert run.left == ([], [])


def test_what_the_browser_draws_is_what_the_run_said(run: Ended, found: dict[str, Any]) -> None:
    *steps, summary = run.said
    assert found["figures"].keys() >= {"reward_first", "reward_last", "control_reward_last", "stall_ms_p99"}
    assert {name: float(value) for name, value in found["figures"].items()} == {
        name: pytest.approx(summary[name]) for name in found["figures"]
    }
    assert found["shown"]["reward_last"] == f"{summary['reward_last']:.2f}"
    assert found["shown"]["faults_survived"] == "0"
    bottom, top = found["ends"]
    for run_name, curve in (("live", found["reward"]), ("control", found["control"])):
        rewards = [step["reward"] for step in steps if step["run"] == run_name]
        drawn = [(bottom - y) / (bottom - top) for _, y in curve]
        assert drawn == pytest.approx(rewards, abs=0.01)
    assert sum(count for count, _ in found["bars"]) == summary["rounds"]
    tallest = max(found["bars"])
    assert tallest[1] > 50
    assert all(
        height == pytest.approx(tallest[1] * count / tallest[0], abs=1.5) for count, height in found["bars"]
    )
    versions = [one["version"] for step in steps for one in step["rounds"]]
    assert sorted(version for version, _ in found["rounds"]) == sorted(versions * 2)
    assert len({y for _, y in found["rounds"]}) == 2  # a row per rank
    assert len(found["gap"]) == 3


def test_the_page_is_whole_by_itself(found: dict[str, Any]) -> None:
    assert found["asked"] == []
    assert len(found["charts"]) == 5
    assert all(width > 300 and height > 50 for _, _, width, height in found["charts"])
    assert found["width"][0] <= found["width"][1]  # nothing sticks out to the side
