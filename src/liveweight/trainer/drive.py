"""One round over all replicas: open, stage, verify, vote, commit; or abort, and say what failed where.

No replica commits unless the quorum voted yes. What is offered, and when its memory may change again, is offers'; which version
comes next is the publisher's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    ManifestInvalid,
    RoundAborted,
    RoundFailed,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.trainer.replica import Replica, ReplicaRefused
from liveweight.trainer.report import ReplicaReport
from liveweight.wire import messages as m
from liveweight.wire.values import Fault, RoundId, fault_of

LOOK_S = 0.5
"""How often a long wait looks whether the publisher is being closed."""
ABORT_S = 2.0
VOTE_S = 10.0


@dataclass(slots=True)
class Part:
    """One replica's part of the round so far. `fault` set: it is out of the round."""

    replica: Replica
    serving: Version | None = None
    round_id: RoundId | None = None
    unchanged: bool = False
    fault: Fault | None = None
    progress: m.Progress | None = None
    committed: m.Committed | None = None
    readers: bool = False

    def report(self) -> ReplicaReport:
        """Its line in the report."""
        progress, committed = self.progress, self.committed
        return ReplicaReport(
            name=self.replica.name,
            serving=self.serving if committed is None else committed.serving,
            committed=self.unchanged or committed is not None,
            stage_s=0.0 if progress is None else progress.stage_s,
            verify_s=0.0 if progress is None else progress.verify_s,
            stall_s=0.0 if committed is None else committed.stall_s,
            staged_bytes=0 if progress is None else progress.staged_bytes,
            reason=None if self.fault is None else self.fault.message,
        )


@dataclass(slots=True)
class Drive:
    """A round under way. Run once, by the driver thread."""

    parts: Sequence[Part]
    order: m.Open
    manifest: Manifest
    quorum: int
    lease_s: float
    deadline: Deadline
    pool: ThreadPoolExecutor
    on_staged: Callable[[], None]
    closing: Callable[[], bool]
    vote_s: float = 0.0
    commit_s: float = 0.0
    _began_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Take every replica of the quorum to the version, or none; RoundFailed says what failed first."""
        try:
            self._each("open", self._open)
            if all(part.unchanged for part in self._in()):
                return
            self._each("stage", lambda part: self._until(part, "staged"))
            self.on_staged()
            self._each("verify", lambda part: self._until(part, "verified"))
            began_s = time.monotonic()
            lease = Deadline.after(self.lease_s)  # started before anyone is asked: we give up first
            self._each("vote", lambda part: self._vote(part, lease))
            self.vote_s = time.monotonic() - began_s
            lease.check("the votes")
            self._commit()
        except BaseException:
            self._abort()
            raise

    def _open(self, part: Part) -> None:
        try:
            opened = part.replica.open(self.order, self.deadline)
        except ReplicaRefused as refused:
            if refused.fault.code != ManifestInvalid.code:
                raise
            part.replica.describe(
                self.order.structure, self.manifest, self.deadline
            )  # its ranks were replaced
            opened = part.replica.open(self.order, self.deadline)
        part.serving, part.round_id, part.unchanged = opened.serving, opened.round, opened.round is None

    def _until(self, part: Part, phase: m.Phase) -> None:
        """Wait until a replica has come that far; its failure, or the deadline, puts it out of the round."""
        if part.round_id is None:
            return
        while True:
            part.progress = part.replica.status(part.round_id, phase, self.deadline.within(LOOK_S))
            if part.progress.fault is not None:
                raise ReplicaRefused(part.progress.fault)
            if m.ORDER[part.progress.phase] >= m.ORDER[phase]:
                return
            if self.closing():
                raise RoundAborted("the publisher was closed")
            if self.deadline.over:
                missing = part.progress.missing
                who = f"rank {', '.join(map(str, missing))} of {part.replica.name}"
                late = self.deadline.exceeded(f"{who} to be {phase}")
                rank = missing[0] if len(missing) == 1 else None
                step = "stage" if phase == "staged" else "verify"
                raise ReplicaRefused(fault_of(late, step=step, rank=rank, waited_s=late.waited_s))

    def _vote(self, part: Part, lease: Deadline) -> None:
        if part.round_id is not None:
            part.replica.vote(part.round_id, self.lease_s, lease.within(VOTE_S))

    def _commit(self) -> None:
        began_s = time.monotonic()
        deadline = Deadline.after(max(self.deadline.remaining_s(), self.lease_s))
        self._each("commit", lambda part: self._commit_one(part, deadline), keep_going=True)
        self.commit_s = time.monotonic() - began_s
        done = [part for part in self.parts if part.unchanged or part.committed is not None]
        if len(done) < self.quorum:
            raise self._failure()

    def _commit_one(self, part: Part, deadline: Deadline) -> None:
        if part.round_id is not None:
            part.committed = part.replica.commit(part.round_id, deadline)

    def _in(self) -> list[Part]:
        return [part for part in self.parts if part.fault is None]

    def _each(self, name: str, step: Callable[[Part], None], *, keep_going: bool = False) -> None:
        """One step on every replica that is still in, all at once; below the quorum the round fails."""
        parts = self._in()
        if len(parts) == 1:
            self._try(name, step, parts[0])
        else:
            list(self.pool.map(lambda part: self._try(name, step, part), parts))
        if self.closing() and not keep_going:
            raise RoundAborted("the publisher was closed")
        if len(self._in()) < self.quorum and not keep_going:
            raise self._failure()

    def _try(self, name: str, step: Callable[[Part], None], part: Part) -> None:
        try:
            step(part)
        except ReplicaRefused as refused:
            part.fault = refused.fault
        except LiveWeightError as error:
            waited_s = error.waited_s if isinstance(error, DeadlineExceeded) else 0.0
            part.fault = fault_of(error, step=name, waited_s=waited_s)
            part.readers = isinstance(error, DeadlineExceeded | ChannelClosed)

    def _failure(self) -> RoundFailed:
        part = next(part for part in self.parts if part.fault is not None)
        fault = part.fault
        if fault is None:
            raise RuntimeError("a round failed without a fault")
        return RoundFailed(
            fault.to_error(),
            replica=part.replica.name,
            rank=fault.rank,
            step=fault.step,
            waited_s=fault.waited_s or time.monotonic() - self._began_s,
            serving=None if part.serving is None else str(part.serving),
        )

    def _abort(self) -> None:
        """Give the round up wherever it is open; note who may still be reading."""
        deadline = Deadline.after(ABORT_S)
        for part in self.parts:
            if part.round_id is None or part.committed is not None:
                continue
            try:
                part.readers = bool(part.replica.abort(part.round_id, "the round failed", deadline))
            except ReplicaRefused:
                continue  # it ended there by itself
            except LiveWeightError:
                part.readers = True  # out of reach: its lease ends the round, its readers are revoked
