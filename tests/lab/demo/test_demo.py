"""`liveweight demo` as a program: with chaos, and ended by signals at moments of all kinds. A short one and its report: tests/browser."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.processes.demo_processes import (
    ENDED_S,
    demo,
    files_left,
    lines_of,
    processes_left,
    shared_memory,
    small_demo,
)
from tests.support.processes.real_servers import until
from tests.support.processes.serve_processes import Process, alive, descendants_of

pytestmark = pytest.mark.timeout(600)
SHORT = ("--steps", "3", "--json")


def test_with_chaos_the_run_goes_on(short_path: Path, tmp_path: Path) -> None:
    arguments = ("--steps", "6", "--json", "--chaos", "--no-control", "--replicas", "2", "--seed", "2")
    with small_demo(short_path, *arguments, "--out", str(tmp_path)) as started:
        *steps, summary = lines_of(started)
    faults = [fault for step in steps for fault in step["faults"]]
    assert {"cut", "deadline", "rank", "replica"} <= {fault["kind"] for fault in faults}
    assert summary["faults_survived"] == len(faults)
    assert len(steps) == 6
    committed = [one["version"] for step in steps for one in step["rounds"] if one["problem"] is None]
    assert set(committed) == set(range(7))
    assert all(step["staleness_worst"] <= 2 for step in steps)
    assert summary["gap_worst"] < 1e-4
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


def until_line(started: subprocess.Popen[str], beginning: str) -> None:
    """Read what it prints up to a line that begins so."""
    assert started.stdout is not None
    assert any(line.startswith(beginning) for line in started.stdout)


def ports_of(processes: list[Process]) -> list[int]:
    """Where these processes listen."""
    held = set()
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            held |= set(process.descriptors)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]


def taken(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex(("127.0.0.1", port)) == 0


def assert_nothing_left(short_path: Path, ports: list[int], memory: set[str]) -> None:
    assert (files_left(short_path), processes_left(short_path)) == ([], [])
    assert [port for port in ports if taken(port)] == []
    assert shared_memory() - memory == set()


def assert_a_signal_leaves_nothing(
    started: subprocess.Popen[str], short_path: Path, memory: set[str], chance: random.Random
) -> None:
    """At any moment of what comes next."""
    threading.Event().wait(chance.random())
    family = descendants_of(started)
    ports = ports_of(family)
    started.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
    _, errors = started.communicate(timeout=ENDED_S)
    assert (started.returncode, errors) == (130, "")
    assert alive(family) == []
    assert_nothing_left(short_path, ports, memory)


OTHERS = ("starting the engines", "live run", "live       2")
MOMENTS = [*(pytest.param(moment, marks=pytest.mark.soak) for moment in OTHERS), "warm-up"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_leaves_nothing_behind(short_path: Path, moment: str) -> None:
    """The soak has more moments; one in the middle of a live run is below, too."""
    memory, chance = shared_memory(), random.Random(moment)
    program = small_demo if moment.startswith("live") else demo  # the warm-up is to last
    with program(short_path, "--steps", "50", "--no-control") as started:
        until_line(started, moment)
        assert_a_signal_leaves_nothing(started, short_path, memory, chance)


def kill_the_engine(started: subprocess.Popen[str]) -> None:
    """From outside."""
    family = descendants_of(started)
    os.kill(next(one.pid for one in family if "liveweight.cli.child" in one.command), signal.SIGKILL)


def test_an_engine_that_is_killed_from_outside_is_started_again_and_a_signal_leaves_nothing_behind(
    short_path: Path,
) -> None:
    """In the soak, the run goes on to its end."""
    memory, chance = shared_memory(), random.Random("after a restart")
    with small_demo(short_path, "--steps", "200", "--no-control") as started:
        until_line(started, "live       2")
        kill_the_engine(started)
        until_line(started, "  survived: ")
        until_line(started, "live ")
        assert_a_signal_leaves_nothing(started, short_path, memory, chance)


@pytest.mark.soak
def test_a_run_whose_engine_is_killed_from_outside_comes_to_its_end(short_path: Path, tmp_path: Path) -> None:
    with demo(short_path, "--steps", "6", "--no-control", "--out", str(tmp_path)) as started:
        until_line(started, "live       2")
        kill_the_engine(started)
        said, errors = started.communicate(timeout=ENDED_S)
    assert (started.returncode, errors) == (0, "")
    assert "survived: " in said
    assert "live       6" in said
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


def test_no_engine_outlives_a_demo_that_is_killed(short_path: Path) -> None:
    with small_demo(short_path, "--steps", "50", "--no-control") as started:
        until_line(started, "live       1")
        family = descendants_of(started)
        started.kill()
        until(lambda: not alive(family), "engines and ranks that end with their demo", 60)
    assert len(family) == 3


def test_a_transfer_mode_that_there_is_not_is_refused_before_anything_starts(short_path: Path) -> None:
    with demo(short_path, "--steps", "1", "--mode", "pigeon") as started:
        _, errors = started.communicate(timeout=ENDED_S)
    assert started.returncode == 2
    assert "pigeon" in errors


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ctrl_c_at_twenty_random_moments_leaves_nothing_behind(short_path: Path) -> None:
    moments, memory = random.Random(6), shared_memory()
    for _ in range(20):
        with demo(short_path, "--steps", "50") as started:
            threading.Event().wait(moments.uniform(0.5, 60.0))
            family = descendants_of(started)
            ports = ports_of(family)
            started.send_signal(signal.SIGINT)
            started.communicate(timeout=ENDED_S)
        assert alive(family) == []
        assert_nothing_left(short_path, ports, memory)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_demos_side_by_side_do_not_disturb_each_other(short_path: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        both = [
            stack.enter_context(demo(short_path, *SHORT, "--out", str(tmp_path / str(number))))
            for number in range(2)
        ]
        for *steps, summary in map(lines_of, both):
            assert (len(steps), summary["rounds"], summary["faults_survived"]) == (6, 4, 0)
    assert (files_left(short_path), processes_left(short_path)) == ([], [])
