"""One replica's progress in a round, as the coordinator knows it, and its line in the report."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from liveweight.rounds.replica import Replica
from liveweight.rounds.report import ReplicaReport
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, RoundId


@dataclass(slots=True)
class ReplicaProgress:
    """How far one replica has come. `serving`: the version it served at its last answer; `fault`: why it left the round, at `failed_s`;
    `silent`: it left because it did not answer; `unanswered`: it was told to commit and has not answered.

    `boot` is the replica's incarnation as far as it is known; `restarted`: in this round it was another one than before.
    """

    replica: Replica
    serving: Version | None = None
    round_id: RoundId | None = None
    unchanged: bool = False
    kept: tuple[str, ...] = ()
    in_place: bool = False
    fault: Fault | None = None
    failed_s: float = 0.0
    silent: bool = False
    unanswered: bool = False
    reached: m.Progress | None = None
    committed: m.Committed | None = None
    readers: bool = False
    boot: str | None = None
    restarted: bool = False

    @property
    def done(self) -> bool:
        """Whether it serves the version."""
        return self.unchanged or self.committed is not None

    @property
    def serves(self) -> Version | None:
        """What it serves, as far as is known."""
        return self.serving if self.committed is None else self.committed.serving

    def on_opened(self, answer: m.Opened) -> None:
        """The replica has answered Open."""
        self.serving, self.round_id, self.unchanged = answer.serving, answer.round, answer.round is None
        self.kept, self.in_place = answer.kept, answer.in_place
        if answer.round is not None:
            self.restarted = self.boot not in (None, answer.round.boot)
            self.boot = answer.round.boot

    def fail(self, fault: Fault) -> None:
        """The replica leaves the round."""
        self.fault, self.failed_s = fault, time.monotonic()

    def _last_progress(self) -> m.Progress | None:
        """The last progress; of a replica in place, with the times and bytes of its commit."""
        if not self.in_place or self.reached is None or self.committed is None:
            return self.reached
        ranks = self.committed.ranks
        return msgspec.structs.replace(
            self.reached,
            stage_s=max((times.stage_s for times in ranks), default=0.0),
            verify_s=max((times.verify_s for times in ranks), default=0.0),
            staged_bytes=sum(times.staged_bytes for times in ranks),
        )

    def report(self, *, verified: bool = False) -> ReplicaReport:
        """Its line in the report. `verified`: digests were compared."""
        progress, committed = self._last_progress(), self.committed
        ranks = () if committed is None or not verified else committed.ranks
        return ReplicaReport(
            name=self.replica.name,
            serving=self.serves,
            committed=self.done,
            stage_s=0.0 if progress is None else progress.stage_s,
            verify_s=0.0 if progress is None else progress.verify_s,
            stall_s=0.0 if committed is None else committed.stall_s,
            staged_bytes=0 if progress is None else progress.staged_bytes,
            reason=None if self.fault is None else self.fault.message,
            kept=self.kept,
            restarted=self.restarted,
            read=("staged" if any(times.unread for times in ranks) else "installed") if ranks else None,
        )
