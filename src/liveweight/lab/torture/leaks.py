"""What must not grow, or stay behind: descriptors, threads, memory, processes, sockets. Looked at where nothing is under way."""

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
"""How much a process may have more than when it was first looked at."""
SETTLE_S = 20.0
LOOK_S = 0.05
"""How long something may still be in use by what is under way, such as a snapshot that is being written."""


def weight_of(pid: int) -> dict[str, int] | None:
    """What a process holds; None if it is gone."""
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
    """Its descriptors, by what they are."""
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
    """Findings, each a line. A process counts from the first look at it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._first: dict[int, dict[str, int]] = {}
        self._kinds: dict[int, Counter[str]] = {}

    def check(self, names: dict[int, str]) -> None:
        """Look at these processes, by id, with what they are called. What is gone again within a while was in use, and no leak."""
        for pid, name in names.items():
            now = weight_of(pid)
            if now is None:
                continue
            first = self._first.setdefault(pid, now)
            kinds = self._kinds.setdefault(pid, kinds_of(pid))
            deadline, pause = Deadline.after(SETTLE_S), threading.Event()
            while now is not None and (grown := _grown(first, now)) and not deadline.over:
                pause.wait(LOOK_S)
                now = weight_of(pid)
            if now is None:
                continue
            for what in grown:
                more = ", ".join(f"{count} {kind}" for kind, count in (kinds_of(pid) - kinds).items())
                self.found.append(f"{name} ({pid}): {first[what]} {what} became {now[what]} (more: {more})")
                first[what] = now[what]

    def check_after(self, processes: Iterable[Forked], files: Sequence[Path]) -> None:
        """When everything was closed: which processes still run, and which files are still there."""
        self.found += [f"process {one.pid} still runs" for one in processes if one.poll() is None]
        self.found += [f"{path.name} is still there" for path in files if path.exists()]
