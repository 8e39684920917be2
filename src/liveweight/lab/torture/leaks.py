"""Finds leaks: descriptors, threads and memory that grow, processes and sockets that stay behind. Checked while no round is open."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from liveweight.lab.torture.fork_server import Forked
from liveweight.spec.deadline import Deadline

DESCRIPTORS = 6
THREADS = 3
RESIDENT_KB = 256 * 1024
"""How much more a process may hold than at its first check."""
SETTLE_S = 20.0
POLL_S = 0.05
"""SETTLE_S: how long something may stay in use, such as by a snapshot that is being written; checked every POLL_S."""


def resources_of(pid: int) -> dict[str, int] | None:
    """The resources of a process; None if it has exited."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in status.splitlines())}
    if "VmRSS" not in fields:
        return None
    return {
        "descriptors": descriptors,
        "threads": int(fields["Threads"][0]),
        "resident_kb": int(fields["VmRSS"][0]),
    }


def kinds_of(pid: int) -> Counter[str]:
    """The number of its descriptors by kind."""
    kinds: Counter[str] = Counter()
    with suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                name = str(path.readlink())
                kinds[name if name.startswith("anon_inode") else name.partition(":[")[0]] += 1
    return kinds


def _grown(first: dict[str, int], now: dict[str, int]) -> list[str]:
    allowed = {"descriptors": DESCRIPTORS, "threads": THREADS, "resident_kb": RESIDENT_KB}
    return [what for what, more in allowed.items() if now[what] > first[what] + more]


class Leaks:
    """The leaks found, each a line. A process is compared with its first check."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._first: dict[int, dict[str, int]] = {}
        self._kinds: dict[int, Counter[str]] = {}

    def check(self, names: dict[int, str]) -> None:
        """Check these processes (names by process id). What is released within SETTLE_S was in use, and is no leak."""
        for pid, name in names.items():
            now = resources_of(pid)
            if now is None:
                continue
            first = self._first.setdefault(pid, now)
            kinds = self._kinds.setdefault(pid, kinds_of(pid))
            deadline, pause = Deadline.after(SETTLE_S), threading.Event()
            while now is not None and (grown := _grown(first, now)) and not deadline.over:
                pause.wait(POLL_S)
                now = resources_of(pid)
            if now is None:
                continue
            for what in grown:
                more = ", ".join(f"{count} {kind}" for kind, count in (kinds_of(pid) - kinds).items())
                self.found.append(f"{name} ({pid}): {first[what]} {what} became {now[what]} (more: {more})")
                first[what] = now[what]

    def check_after(self, processes: Iterable[Forked], files: Sequence[Path]) -> None:
        """Called after everything was closed: find processes that still run, and files that still exist."""
        self.found += [f"process {one.pid} still runs" for one in processes if one.poll() is None]
        self.found += [f"{path.name} is still there" for path in files if path.exists()]
