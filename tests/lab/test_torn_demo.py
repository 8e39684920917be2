"""`liveweight demo torn` as a program: what it counts, with and without a kill, and what is left of it after Ctrl-C."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from liveweight.cli import main
from tests.arch.source_tree import ROOT
from tests.support.processes.serve_processes import alive, descendants_of

SMALL = ("--clients", "2", "--tokens", "24")
ENDED_S = 280.0
pytestmark = pytest.mark.timeout(300)


@contextmanager
def demo(short_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program, whose temporary files all lie under the path. Killed with the block, if it has not ended before."""
    command = [sys.executable, "-m", "liveweight.cli.main", "demo", "torn", *SMALL, *arguments]
    environment = {**os.environ, "TMPDIR": str(short_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def files_left(short_path: Path) -> list[Path]:
    """What lies there still, but for the directory that torch makes for its compiler's cache."""
    return [path for path in short_path.iterdir() if not path.name.startswith("torchinductor_")]


def counted(started: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints, once it has ended well."""
    said, errors = started.communicate(timeout=ENDED_S)
    assert (started.returncode, errors) == (0, "")
    return counts_in(said)


def counts_in(said: str) -> dict[str, Any]:
    """What it has printed."""
    found: dict[str, Any] = json.loads(said)
    for side in (found["left"], found["right"]):
        assert side["old"] + side["new"] + side["neither"] == side["total"] == side["streamed"] > 0
        assert side["total"] % 24 == 0, "every answer has all its tokens"
    return found


@pytest.fixture
def forked_demo(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, forked_python: None
) -> Callable[..., dict[str, Any]]:
    """The command, run here; its engines, ranks and trainers are processes of their own all the same. What it prints."""
    del forked_python
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))

    def run(*arguments: str) -> dict[str, Any]:
        ended = CliRunner().invoke(main.app, ["demo", "torn", *SMALL, *arguments, "--json"])
        assert (ended.exit_code, ended.stderr) == (0, ""), ended.exception
        assert files_left(short_path) == []
        return counts_in(ended.stdout)

    return run


def test_after_a_kill_the_left_side_serves_a_mixture_and_the_right_side_never(
    forked_demo: Callable[..., dict[str, Any]],
) -> None:
    """The soak has the program itself, also without a pause."""
    assert_torn_left_and_whole_right(forked_demo("--pause"))


@pytest.mark.soak
@pytest.mark.parametrize("pause", ["--pause", "--no-pause"])
def test_the_program_finds_a_mixture_on_the_left_side_and_none_on_the_right(
    short_path: Path, pause: str
) -> None:
    with demo(short_path, pause, "--json") as started:
        assert_torn_left_and_whole_right(counted(started))
    assert files_left(short_path) == []


def assert_torn_left_and_whole_right(found: dict[str, Any]) -> None:
    left, right = found["left"], found["right"]
    torn = left["parts"]["after_kill"]
    assert torn["neither"] > torn["total"] / 4  # some of these answers end under the successor's weights
    assert left["serving"] == "initial"
    assert right["neither"] == 0
    assert right["parts"]["after_kill"]["old"] > 0
    healed = [side["parts"]["after_successor"] for side in (left, right)]
    assert all(part["new"] == part["total"] > 0 for part in healed)
    assert right["serving"] == "step_2"
    assert found["holds"]


def test_without_a_kill_both_sides_go_from_the_old_version_to_the_new(
    forked_demo: Callable[..., dict[str, Any]],
) -> None:
    found = forked_demo("--no-kill")
    for side in (found["left"], found["right"]):
        assert side["neither"] == 0
        assert side["old"] > 0
        last = side["parts"]["after_successor"]
        assert last["new"] == last["total"] > 0


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param("starting two engines", signal.SIGINT, id="SIGINT at the start"),
        pytest.param("kill -9", signal.SIGTERM, id="SIGTERM after the kill"),
    ],
)
def test_a_signal_leaves_nothing_behind(short_path: Path, moment: str, number: signal.Signals) -> None:
    with demo(short_path) as started:
        assert started.stdout is not None
        assert any(moment in line for line in started.stdout)
        family = descendants_of(started)
        started.send_signal(number)
        _, errors = started.communicate(timeout=ENDED_S)
        assert (started.returncode, errors) == (130, "")
        assert (alive(family), files_left(short_path)) == ([], [])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_at_the_same_time_do_not_disturb_each_other(short_path: Path) -> None:
    with ExitStack() as stack:
        both = [stack.enter_context(demo(short_path, "--json")) for _ in range(2)]
        for found in map(counted, both):
            assert found["left"]["neither"] > 0
            assert found["holds"]
    assert files_left(short_path) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ctrl_c_at_random_moments_leaves_nothing_behind(short_path: Path) -> None:
    moments = random.Random(6)
    for _ in range(20):
        with demo(short_path, "--json") as started:
            threading.Event().wait(moments.uniform(0.5, 40.0))
            family = descendants_of(started)
            started.send_signal(signal.SIGINT)
            started.communicate(timeout=ENDED_S)
            assert (alive(family), files_left(short_path)) == ([], [])
