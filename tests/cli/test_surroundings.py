"""Programs do not depend on what they inherit: ignored signals, a strict umask, no locale, no home, no terminal. Nor does this session."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.arch.source_tree import ROOT
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.engine.tokenizer_dirs import write_byte_level
from tests.support.processes.demo_processes import files_left, processes_left
from tests.support.surroundings import SWITCHES, TEMPORARY_BYTES, UMASK, settle, umask

HOSTILE = "trap '' INT QUIT HUP TERM; umask 077; exec \"$@\""
WATCHING = ("status", "http://127.0.0.1:1", "--watch", "0.1")
"""Nobody answers there."""
ENDING = [signal.SIGINT, signal.SIGTERM]


@contextmanager
def started(place: Path, module: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The program in hostile surroundings, its temporary files below `place`. Killed with the block, if it has not ended before."""
    words = [str(argument) for argument in arguments]
    command = ["sh", "-c", HOSTILE, "sh", sys.executable, "-m", module, *words]
    environment = {"PATH": os.environ["PATH"], "LANG": "C", "HOME": os.devnull, "TMPDIR": str(place)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def until_line(program: subprocess.Popen[str], wanted: str) -> None:
    """Wait for a line of its output that has these words."""
    assert program.stdout is not None
    assert any(wanted in line for line in program.stdout), program.stderr and program.stderr.read()


def ended(program: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Its exit code and its errors, after that signal."""
    program.send_signal(number)
    _, errors = program.communicate(timeout=WITHIN_S)
    return program.returncode, errors


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize(("model", "line"), [("slow", "starting"), ("model", "serving echo")])
def test_serve_ends_with_0(short_path: Path, model: str, line: str, number: signal.Signals) -> None:
    directory = short_path / model
    directory.mkdir()
    write_byte_level(directory)
    with started(
        short_path, "tests.support.programs.serve_program", "serve", directory, "--port", 0
    ) as program:
        until_line(program, line)
        assert ended(program, number) == (0, "")


@pytest.mark.parametrize("number", ENDING)
def test_offer_ends_with_0_and_others_cannot_read_what_it_made(
    models: Models, short_path: Path, number: signal.Signals
) -> None:
    offer = ("offer", models.directory(), "--version", "step_1")
    with started(short_path, "liveweight.cli.main", *offer) as program:
        until_line(program, "offering step_1")
        made = [path for path in short_path.rglob("*") if not path.name.startswith("torchinductor_")]
        assert made
        assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
        assert ended(program, number) == (0, "")


def test_status_that_watches_ends_with_130(short_path: Path) -> None:
    with started(short_path, "liveweight.cli.main", *WATCHING) as program:
        until_line(program, "engine")
        code, _ = ended(program, signal.SIGINT)
    assert code == 130


@pytest.mark.parametrize("number", [*ENDING, signal.SIGHUP])
def test_the_demo_ends_with_130_and_leaves_nothing_behind(short_path: Path, number: signal.Signals) -> None:
    with started(
        short_path, "tests.support.programs.small_demo", "demo", "--steps", 50, "--no-control"
    ) as program:
        until_line(program, "starting the engines")
        assert ended(program, number) == (130, "")
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


def test_the_torn_demo_ends_with_130_and_leaves_nothing_behind(short_path: Path) -> None:
    with started(short_path, "liveweight.cli.main", "demo", "torn", "--size", "tiny") as program:
        until_line(program, "starting two engines")
        assert ended(program, signal.SIGINT) == (130, "")
    assert (files_left(short_path), processes_left(short_path)) == ([], [])


def test_this_session_has_its_own_surroundings() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert umask() == UMASK
    assert {name for name in os.environ if name.startswith("LIVEWEIGHT_")} <= SWITCHES
    assert Path.home().name.startswith("lw-home-")
    assert os.access(Path.home(), os.W_OK)


def test_a_session_that_is_started_in_others_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LIVEWEIGHT_API_KEY", "LC_ALL", "PYTHONWARNINGS", "https_proxy", "GITHUB_ACTIONS", "COLUMNS")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TMPDIR", "/" + TEMPORARY_BYTES * "t")
    monkeypatch.setattr(tempfile, "tempdir", os.environ["TMPDIR"])
    monkeypatch.setenv("LIVEWEIGHT_PADDLE_PYTHON", "python")
    number, before = signal.SIGQUIT, signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    try:
        settle()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    test_this_session_has_its_own_surroundings()
    assert {*names, "TMPDIR"} & set(os.environ) == set()
    assert os.environ["LIVEWEIGHT_PADDLE_PYTHON"] == "python"
    assert len(tempfile.gettempdir()) <= TEMPORARY_BYTES
