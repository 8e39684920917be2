"""Five demos with five seeds: every one learns, and none of the control runs does."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveweight.transports.registry import TRANSPORTS
from tests.support.processes.demo_processes import demo, files_left, lines_of, processes_left


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_every_seed_learns_and_only_where_weights_are_published(
    short_path: Path, tmp_path: Path, seed: int
) -> None:
    with demo(short_path, "--json", "--seed", str(seed), "--out", str(tmp_path)) as started:
        *steps, summary = lines_of(started, within_s=3000)
    assert summary["reward_first"] < 0.2
    assert summary["reward_last"] > 0.8
    assert summary["control_reward_last"] < 0.2
    assert all(step["staleness_worst"] <= 2 for step in steps if step["run"] == "live")
    assert summary["crossed"] > 0
    assert summary["gap_worst"] < 1e-4
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", sorted(TRANSPORTS))
def test_every_transfer_mode_carries_it(short_path: Path, tmp_path: Path, mode: str) -> None:
    arguments = ("--json", "--steps", "3", "--no-control", "--mode", mode, "--out", str(tmp_path))
    with demo(short_path, *arguments) as started:
        *_, summary = lines_of(started)
    assert (summary["mode"], summary["rounds"], summary["rounds_failed"]) == (mode, 4, 0)
    assert summary["gap_worst"] < 1e-4
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_it_learns_with_chaos_too(short_path: Path, tmp_path: Path) -> None:
    arguments = ("--json", "--chaos", "--no-control", "--replicas", "2", "--out", str(tmp_path))
    with demo(short_path, *arguments) as started:
        *_, summary = lines_of(started, within_s=3000)
    assert summary["reward_last"] > 0.8
    assert summary["faults_survived"] >= 4
    assert summary["gap_worst"] < 1e-4
