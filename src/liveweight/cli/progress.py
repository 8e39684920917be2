"""A round's progress on the terminal: one line per engine, which grows with every step.

ProgressReplica wraps a replica, forwards every call, and adds its result to the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from liveweight.rounds.replica import Replica
    from liveweight.spec.deadline import Deadline
    from liveweight.spec.manifest import Version
    from liveweight.wire import messages as m
    from liveweight.wire.messages.values import RoundId

SEPARATOR = " · "


class ProgressLine:
    """The steps of one engine so far. The only line grows as steps are taken; one of several is written when it ends."""

    def __init__(self, name: str, write: Callable[[str], None], *, alone: bool) -> None:
        self._name, self._write, self._alone = name, write, alone
        self._steps: list[str] = []

    def add(self, step: str) -> None:
        """Append a step."""
        if self._alone:
            self._write(f"{SEPARATOR}{step}" if self._steps else step)
        self._steps.append(step)

    def end(self) -> None:
        """End the line. May be called twice."""
        if self._steps:
            self._write("\n" if self._alone else f"{self._name}: {SEPARATOR.join(self._steps)}\n")
        self._steps = []


class ProgressReplica:
    """A replica that writes its progress to a line. `ranks` is the number of its ranks."""

    def __init__(self, replica: Replica, line: ProgressLine, *, ranks: int, verify: bool) -> None:
        self._replica, self._line, self._ranks, self._verify = replica, line, ranks, verify
        self._tensors, self._optional = 0, dict[str, int]()
        self._reached: set[str] = set()

    @property
    def name(self) -> str:
        """See Replica."""
        return self._replica.name

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        """See Replica."""
        replica_state = self._replica.replica_state(deadline)
        self._tensors = len(replica_state.expected.tensors)
        self._optional = {group.name: len(group.tensors) for group in replica_state.optional}
        return replica_state

    def describe(self, body: m.Describe, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.describe(body, deadline)

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica."""
        opened = self._replica.open(body, deadline)
        absent = sum(self._optional.get(name, 0) for name in opened.kept)
        self._line.add(f"open {self._tensors - absent}/{self._tensors}")
        for name in opened.kept:
            self._line.add(f"{name} kept")
        if opened.round is None:
            self._line.add("installed already")
        return opened

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica."""
        from liveweight.wire.messages import ORDER

        progress = self._replica.status(round_id, until, deadline)
        reached = progress.fault is None and ORDER[progress.phase] >= ORDER[until]
        if reached and until not in self._reached:
            self._reached.add(until)
            self._line.add(self._step(until, progress))
        return progress

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.compare(round_id, digests, deadline)

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.vote(round_id, lease_s, deadline)
        self._line.add(f"voted {self._ranks}/{self._ranks}")

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""
        committed = self._replica.commit(round_id, deadline)
        self._line.add(f"commit {committed.stall_s * 1e3:.1f} ms")
        return committed

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        """See Replica."""
        return self._replica.abort(round_id, reason, deadline)

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.mark_behind(version, reason, deadline)

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        """See Replica."""
        return self._replica.undo(publisher, deadline)

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        """See Replica."""
        return self._replica.verify(body, deadline)

    def interrupt(self) -> None:
        """See Replica."""
        self._replica.interrupt()

    def close(self) -> None:
        """See Replica."""
        self._replica.close()

    def _step(self, until: m.Phase, progress: m.Progress) -> str:
        if until == "staged":
            return f"staged {progress.staged_bytes / 1e6:.1f} MB"
        return f"verified {self._ranks}/{self._ranks}" if self._verify else "not verified"
