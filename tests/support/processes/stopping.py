"""Stopping a process for a test."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from liveweight.spec.deadline import Deadline

WITHIN_S = 60.0
STOPPED = ("T", "t", "Z", "X")


def stop(pid: int, within_s: float = WITHIN_S) -> None:
    """SIGSTOP, and wait until every thread of the process is stopped.

    The signal alone does not stop it: one thread must be scheduled to take it, and until then the others work on.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = Deadline.after(within_s)
    while not all(state in STOPPED for state in thread_states(pid)):
        deadline.check(f"process {pid} to stand still")
        select.select([], [], [], 0.001)


def thread_states(pid: int) -> list[str]:
    """The state letters of its threads; of those that ended meanwhile, none."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        states.append(text.rpartition(")")[2].split()[0])
    return states
