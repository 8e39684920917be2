"""`liveweight serve` as a process of its own, its ranks, and clients that stream from it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.arch.source_tree import ROOT
from tests.support.engine.engines import WITHIN_S

LONG: dict[str, Any] = {
    "prompt": "the quick brown fox",
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
}


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program and its ranks, ended with the block if they have not ended before."""
    command = [sys.executable, "-m", "liveweight.cli.main", "serve", *arguments, "--threads", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def url_of(started: subprocess.Popen[str]) -> str:
    """Where it serves, from the line that it prints when it does."""
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line.startswith("serving "), (line, started.stderr and started.stderr.read())
    return line.split()[3].rstrip(",")


def ended(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said last."""
    _, errors = started.communicate(timeout=WITHIN_S)
    return started.returncode, errors


@dataclass(frozen=True)
class Process:
    """A process, distinguished from a later one with the same id by its start time."""

    pid: int
    born: str

    @property
    def alive(self) -> bool:
        """Whether it has not ended; whether somebody has asked for its exit code does not matter."""
        fields = _fields(self.pid)
        return fields is not None and fields["born"] == self.born and fields["state"] != "Z"

    @property
    def command(self) -> str:
        """What it was started with."""
        return Path(f"/proc/{self.pid}/cmdline").read_text().rstrip("\0")

    @property
    def descriptors(self) -> list[str]:
        """What its descriptors stand for."""
        return [str(path.readlink()) for path in Path(f"/proc/{self.pid}/fd").iterdir()]

    def status(self, name: str) -> int:
        """A number that the kernel tells of it."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def _fields(pid: int) -> dict[str, str] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return {"state": fields[0], "parent": fields[1], "born": fields[19]}


def process_of(started: subprocess.Popen[str]) -> Process:
    """The program's own process."""
    fields = _fields(started.pid)
    assert fields is not None
    return Process(started.pid, fields["born"])


def ranks_of(started: subprocess.Popen[str]) -> list[Process]:
    """The processes of its two ranks, by rank; it has no other children."""
    known = {int(path.name): _fields(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [Process(pid, f["born"]) for pid, f in known.items() if f and int(f["parent"]) == started.pid]
    by_rank = {process.command.rpartition("# rank ")[2]: process for process in found}
    assert (len(found), sorted(by_rank)) == (2, ["0", "1"])
    return [by_rank["0"], by_rank["1"]]


def descendants_of(started: subprocess.Popen[str]) -> list[Process]:
    """All processes that it started, and those that they started."""
    known = {int(path.name): _fields(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    family, found = {started.pid}, list[Process]()
    while more := [pid for pid, f in known.items() if f and pid not in family and int(f["parent"]) in family]:
        family |= set(more)
        found += [Process(pid, fields["born"]) for pid in more if (fields := known[pid]) is not None]
    return found


def alive(processes: Iterable[Process]) -> list[Process]:
    """Those that have not ended."""
    return [process for process in processes if process.alive]


class Client(threading.Thread):
    """A client that streams and keeps what it gets."""

    def __init__(self, url: str, **changes: object) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.broken: httpx.TransportError | None = None
        self.ended_s: float | None = None
        self._began = threading.Event()
        self._url, self._body = f"{url}/v1/completions", {**LONG, **changes}
        self.start()

    def run(self) -> None:
        """Until the stream ends, or breaks."""
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=WITHIN_S) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line.removeprefix("data: "))
                        self._began.set()
        except httpx.TransportError as error:
            self.broken = error
        finally:
            self.ended_s = time.monotonic()

    def until_begun(self) -> None:
        """The first tokens have come."""
        assert self._began.wait(WITHIN_S)

    def until_ended(self) -> float:
        """Nothing comes any more; since when."""
        self.join(WITHIN_S)
        assert self.ended_s is not None
        return self.ended_s
