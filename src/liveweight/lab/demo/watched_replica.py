"""A replica that records its rounds: the stages that they reach, and what its ranks did. With --chaos, it can cut its connection.

Called by the publisher's threads; read by the trainer's once the round has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from liveweight.errors import ChannelClosed
from liveweight.lab.demo.records import RankPart, ReplicaPart, Stage
from liveweight.rounds.replica import Replica
from liveweight.spec.deadline import Deadline
from liveweight.wire import messages as m
from liveweight.wire.messages.values import RankTimes, RoundId

OnStage = Callable[[int, int, Stage, float], None]
"""(version, replica, stage reached, milliseconds since the round was opened)"""
_STAGE_OF: dict[m.Phase, Stage] = {"staged": "stage", "verified": "verify"}


@dataclass(slots=True)
class _Notes:
    version: int = 0
    began_s: float = 0.0
    reached_ms: dict[Stage, float] = field(default_factory=dict)
    committed: m.Committed | None = None


class Driven(Replica, Protocol):
    """A replica whose connection can be cut."""

    def disconnect(self) -> None:
        """Close the connection; the next call opens another."""


class WatchedReplica:
    """Wraps a replica, and calls `on_stage` whenever its round reaches a stage. Implements the port Replica."""

    def __init__(self, number: int, replica: Driven, on_stage: OnStage) -> None:
        self.number = number
        self.cut_after: Stage | None = None
        """Cut the connection once the next round has reached this stage."""
        self._replica, self._on_stage, self._notes = replica, on_stage, _Notes()
        self.replica_state, self.describe, self.compare = (
            replica.replica_state,
            replica.describe,
            replica.compare,
        )
        self.abort, self.mark_behind, self.undo = replica.abort, replica.mark_behind, replica.undo
        self.verify, self.interrupt, self.close = replica.verify, replica.interrupt, replica.close

    @property
    def name(self) -> str:
        """See Replica."""
        return self._replica.name

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica."""
        self._notes = _Notes(version=int(body.version.label), began_s=time.monotonic())
        opened = self._replica.open(body, deadline)
        self._reach("open")
        return opened

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica."""
        progress = self._replica.status(round_id, until, deadline)
        if progress.fault is None and m.ORDER[progress.phase] >= m.ORDER[until]:
            self._reach(_STAGE_OF[until])
        return progress

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.vote(round_id, lease_s, deadline)
        self._reach("vote")

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""
        self._notes.committed = self._replica.commit(round_id, deadline)
        self._reach("commit")
        return self._notes.committed

    def part(self) -> ReplicaPart:
        """The record of this replica's part in the last round."""
        committed = self._notes.committed
        return ReplicaPart(
            replica=self.number,
            committed=committed is not None,
            stall_ms=0.0 if committed is None else committed.stall_s * 1e3,
            reached_ms=tuple(self._notes.reached_ms.items()),
            ranks=() if committed is None else tuple(_rank(times) for times in committed.ranks),
        )

    def _reach(self, stage: Stage) -> None:
        notes = self._notes
        notes.reached_ms[stage] = (time.monotonic() - notes.began_s) * 1e3
        self._on_stage(notes.version, self.number, stage, notes.reached_ms[stage])
        if self.cut_after == stage:
            self.cut_after = None
            self._replica.disconnect()
            raise ChannelClosed(f"the connection to {self.name} was cut")


def _rank(times: RankTimes) -> RankPart:
    return RankPart(
        rank=times.rank,
        stage_ms=times.stage_s * 1e3,
        verify_ms=times.verify_s * 1e3,
        swap_ms=times.swap_s * 1e3,
        staged_bytes=times.staged_bytes,
    )
