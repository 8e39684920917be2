"""The demo's report in a real browser: what is laid out and drawn is what the run's JSON says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import chromium, measured
from tests.support.demo_processes import demo, lines_of

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A short demo's report, and its JSON."""
    chromium()
    directory = tmp_path_factory.mktemp("demo")
    with demo(directory, "--steps", "3", "--json", "--out", str(directory / "out")) as started:
        return directory / "out" / "index.html", lines_of(started)


def test_what_the_browser_draws_is_what_the_run_said(
    run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    page, (*steps, summary) = run
    found = measured(page, LOOK, tmp_path)
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


def test_the_page_is_whole_by_itself(run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    page, _ = run
    found = measured(page, LOOK, tmp_path)
    assert found["asked"] == []
    assert len(found["charts"]) == 5
    assert all(width > 300 and height > 50 for _, _, width, height in found["charts"])
    assert found["width"][0] <= found["width"][1]  # nothing sticks out to the side
