"""`liveweight demo --engine vllm` as a program: from end to end, and killed in the middle."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes.demo_processes import demo, files_left, lines_of, processes_left
from tests.support.processes.real_servers import until
from tests.support.processes.serve_processes import alive, descendants_of
from tests.vllm.serving import VLLM_PYTHON

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]
ENGINE = ("--engine", "vllm", "--vllm-python", str(VLLM_PYTHON))


def test_a_short_demo_publishes_every_step_into_vllm(place: Path, short_path: Path, tmp_path: Path) -> None:
    del place  # vLLM is there
    with demo(short_path, *ENGINE, "--steps", "3", "--json", "--out", str(tmp_path)) as started:
        *steps, summary = lines_of(started, within_s=1000)
    live = steps[:3]
    assert [one["version"] for step in live for one in step["rounds"]] == [0, 1, 2, 3]
    assert all(one["problem"] is None for step in live for one in step["rounds"])
    assert all(step["rounds"] == [] for step in steps[3:])
    assert all(step["staleness_worst"] <= 2 for step in live)
    assert sum(step["gap"]["tokens"] for step in live) > 0
    assert (
        summary["gap_mean"] < 0.05
    )  # of rounding to bfloat16; weights of another version differ by whole units
    assert "vllm serve" in (tmp_path / "index.html").read_text()
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


def test_a_demo_that_is_killed_takes_its_vllm_along(place: Path, short_path: Path) -> None:
    del place
    with demo(short_path, *ENGINE, "--steps", "50", "--no-control") as started:
        assert started.stdout is not None
        assert any(line.startswith("live run") for line in started.stdout)
        family = descendants_of(started)
        started.send_signal(signal.SIGKILL)
        started.wait()
    until(lambda: not alive(family), "vLLM to end with the demo")
    assert processes_left(short_path) == []
