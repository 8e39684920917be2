"""`liveweight demo` as a program, and what is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.arch.source_tree import ROOT

ENDED_S = 500.0


@contextmanager
def demo(
    short_path: Path, *arguments: str, program: str = "liveweight.cli.main"
) -> Iterator[subprocess.Popen[str]]:
    """The program, whose temporary files all lie under the path. Killed with the block, if it has not ended before."""
    command = [sys.executable, "-m", program, "demo", *arguments]
    environment = {**os.environ, "TMPDIR": str(short_path), "COLUMNS": "200"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def small_demo(short_path: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """The same with little to learn, for tests of processes."""
    return demo(short_path, *arguments, program="tests.support.programs.small_demo")


def lines_of(started: subprocess.Popen[str], within_s: float = ENDED_S) -> list[dict[str, Any]]:
    """The JSON lines that it prints, once it has ended well."""
    output, errors = started.communicate(timeout=within_s)
    assert (started.returncode, errors) == (0, "")
    return [json.loads(line) for line in output.splitlines()]


def files_left(short_path: Path) -> list[Path]:
    """What lies there still, but for the directory that torch makes for its compiler's cache."""
    return [path for path in short_path.iterdir() if not path.name.startswith("torchinductor_")]


def processes_left(short_path: Path) -> list[int]:
    """Processes that were started with their temporary files under the path, whoever their parent is by now."""
    needle = f"TMPDIR={short_path}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (place / "environ").read_bytes():
                found.append(int(place.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def shared_memory() -> set[str]:
    """The names of shared memory that could be ours."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("lw", "liveweight"))}
