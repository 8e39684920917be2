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
    OutcomeUnknown,
    RoundAborted,
    RoundFailed,
    Torn,
    WireError,
)
from liveweight.rounds.replica import ReplicaRefused
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, fault_of

LOOK_S = 0.5
"""How often a long wait looks whether the publisher is being closed."""
MARGIN_S = 5.0
"""How much longer than the publisher a replica waits: the publisher gives up first."""
ABORT_S = 2.0
"""How long the replicas of a failed round may take to stop reading."""
STANDING_S = 5.0


@dataclass(slots=True)
class RoundCoordinator:
    """A round under way. Run once, by the driver thread.

    `meanwhile` is called once the round is open, while ranks stage; `poll`, now and then until they have; `on_staged`, once they have (it
    may give digests that the round opened without); `before_vote`, once they have verified. What these raise ends the round before a vote.
    `patience` is how long one replica may take to stage and verify where the quorum can do without it: the others vote then.
    `mark_behind`: a replica that the others went on without is told to take no requests before it has caught up.
    `on_read` is called when no rank reads the source any more: once they have staged, or, where one is in place, after the commit.
    """

    parts: Sequence[ReplicaProgress]
    order: m.Open
    manifest: Manifest
    quorum: int
    lease_s: float
    deadline: Deadline
    pool: ThreadPoolExecutor
    on_staged: Callable[[], bytes | None]
    closing: Callable[[], bool]
    meanwhile: Callable[[], None] = lambda: None
    poll: Callable[[], None] = lambda: None
    before_vote: Callable[[], None] = lambda: None
    on_read: Callable[[], object] = lambda: None
    patience: Deadline | None = None
    mark_behind: bool = False
    step: str = "open"
    vote_s: float = 0.0
    commit_s: float = 0.0
    _began_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Take every replica of the quorum to the version, or none. RoundFailed says what failed first; OutcomeUnknown, that a replica
        was told to commit and did not answer."""
        try:
            self._rounds()
        except (RoundFailed, OutcomeUnknown):
            self._abort()
            raise
        except LiveWeightError as error:
            self._abort()
            raise self._failed(self.parts[0], fault_of(error, step=self.step)) from error
        except BaseException:
            self._abort()
            raise
        self._abort_the_left()

    def _rounds(self) -> None:
        self._each("open", self._open)
        self.meanwhile()
        if all(progress.unchanged for progress in self._in()):
            return
        self._each("stage", lambda progress: self._until(progress, "staged"))
        if self.patience is not None and self.patience.over:
            self.patience = None  # one that lagged had it all: the others verify in the round's own time
        digests = self.on_staged()
        in_place = any(progress.in_place for progress in self._in())
        if not in_place:
            self.on_read()
        self._each("verify", lambda progress: self._verified(progress, digests))
        self.step = "vote"
        self.before_vote()
        began_s = time.monotonic()
        lease = Deadline.after(self.lease_s)  # started before anyone is asked: we give up first
        self._each("vote", lambda progress: self._vote(progress, lease))
        self.vote_s = time.monotonic() - began_s
        lease.check("the votes")
        self._commit()
        if in_place:
            self.on_read()

    def _open(self, progress: ReplicaProgress) -> None:
        try:
            opened = progress.replica.open(self.order, self._patience)
        except ReplicaRefused as refused:
            if refused.fault.code != ManifestInvalid.code:
                raise
            # Its ranks were replaced, or it was not there when the others were told.
            progress.replica.describe(self.order.structure, self.manifest, self._patience)
            opened = progress.replica.open(self.order, self._patience)
        progress.opened(opened)

    def _verified(self, progress: ReplicaProgress, digests: bytes | None) -> None:
        if digests is not None and progress.round_id is not None:
            within = Deadline.after(max(LOOK_S, self._patience.remaining_s()))
            progress.replica.compare(progress.round_id, digests, within)
        self._until(progress, "verified")

    def _until(self, progress: ReplicaProgress, phase: m.Phase) -> None:
        """Wait until a replica has come that far; its failure, or the deadline, puts it out of the round."""
        while progress.round_id is not None:
            try:
                # From now, also where one that lags took all the time: who has come that far says so at once.
                poll = Deadline.after(min(LOOK_S, self._patience.remaining_s()))
                progress.reached = progress.replica.status(progress.round_id, phase, poll)
            except DeadlineExceeded:
                if self._patience.over:
                    raise self._silent(progress, phase) from None
                continue  # no news: its process stood still for a moment
            if progress.reached.fault is not None:
                raise ReplicaRefused(progress.reached.fault, progress.serving)
            if m.ORDER[progress.reached.phase] >= m.ORDER[phase]:
                return
            if self.closing():
                raise RoundAborted("the publisher was closed")
            if phase == "staged":
                self.poll()
            if self._patience.over:
                raise self._late(progress, progress.reached, phase)

    @property
    def _patience(self) -> Deadline:
        """Until when replicas are waited for: all of the round's time, where each of them is needed."""
        spare = len(self.parts) > self.quorum
        return self.patience if spare and self.patience is not None else self.deadline

    def _silent(self, progress: ReplicaProgress, phase: m.Phase) -> DeadlineExceeded:
        """The whole time that it was waited for, not that of the last question."""
        return self._patience.exceeded(f"{progress.replica.name} to be {phase}")

    def _late(self, progress: ReplicaProgress, reached: m.Progress, phase: m.Phase) -> ReplicaRefused:
        missing = reached.missing
        who = f"rank {', '.join(map(str, missing))} of {progress.replica.name}"
        late = self._patience.exceeded(f"{who} to be {phase}")
        progress.readers = bool(reached.readers)
        step = "stage" if phase == "staged" else "verify"
        rank = missing[0] if len(missing) == 1 else None
        return ReplicaRefused(fault_of(late, step=step, rank=rank, waited_s=late.waited_s), progress.serving)

    def _vote(self, progress: ReplicaProgress, lease: Deadline) -> None:
        if progress.round_id is not None:
            progress.replica.vote(progress.round_id, self.lease_s, lease)

    def _commit(self) -> None:
        began_s = time.monotonic()
        deadline = Deadline.after(max(self.deadline.remaining_s(), self.lease_s))
        self._each("commit", lambda progress: self._commit_one(progress, deadline), keep_going=True)
        self.commit_s = time.monotonic() - began_s
        for progress in self.parts:
            if progress.unheard:
                self._ask_again(progress)
        unheard = [progress.replica.name for progress in self.parts if progress.unheard]
        if sum(progress.done for progress in self.parts) >= self.quorum:
            return
        if unheard:
            raise OutcomeUnknown(f"{', '.join(unheard)} was told to commit and did not answer")
        raise self._failure()

    def _commit_one(self, progress: ReplicaProgress, deadline: Deadline) -> None:
        if progress.round_id is None:
            return
        try:
            progress.committed = progress.replica.commit(progress.round_id, deadline)
        except (DeadlineExceeded, WireError, RoundAborted):  # the last: interrupted while it waited
            progress.unheard = True
            raise

    def _ask_again(self, progress: ReplicaProgress) -> None:
        """The answer to a commit was lost: what the replica serves now tells, if it can be reached."""
        try:
            replica_state = progress.replica.replica_state(Deadline.after(STANDING_S))
        except (LiveWeightError, ReplicaRefused):
            return
        if replica_state.round == progress.round_id:
            return  # still at it
        progress.unheard, progress.serving = False, replica_state.serving
        if replica_state.serving is not None and replica_state.serving.same_name(self.order.version):
            progress.committed = m.Committed(
                serving=replica_state.serving, undo=replica_state.undo, stall_s=0.0
            )
            progress.fault = None
        elif replica_state.torn is not None:
            progress.fault = fault_of(Torn(replica_state.torn), step="commit")

    def _in(self) -> list[ReplicaProgress]:
        return [progress for progress in self.parts if progress.fault is None]

    def _each(self, name: str, step: Callable[[ReplicaProgress], None], *, keep_going: bool = False) -> None:
        """One step on every replica that is still in, all at once; below the quorum the round fails."""
        self.step = name
        parts = self._in()
        if len(parts) == 1:
            self._try(name, step, parts[0])
        else:
            list(self.pool.map(lambda progress: self._try(name, step, progress), parts))
        if self.closing() and not keep_going:
            raise RoundAborted("the publisher was closed")
        if len(self._in()) < self.quorum and not keep_going:
            raise self._failure()

    def _try(self, name: str, step: Callable[[ReplicaProgress], None], progress: ReplicaProgress) -> None:
        try:
            step(progress)
        except ReplicaRefused as refused:
            torn = refused.fault.code == Torn.code
            progress.serving = progress.serving if refused.serving is None and not torn else refused.serving
            progress.fail(refused.fault)
        except LiveWeightError as error:
            waited_s = error.waited_s if isinstance(error, DeadlineExceeded) else 0.0
            progress.readers = isinstance(error, DeadlineExceeded | ChannelClosed)
            progress.fail(fault_of(error, step=name, waited_s=waited_s))

    def _failure(self) -> RoundFailed:
        """What failed first."""
        out = [
            (progress.failed_s, number)
            for number, progress in enumerate(self.parts)
            if progress.fault is not None
        ]
        progress = self.parts[min(out)[1]] if out else self.parts[0]
        too_few = fault_of(RoundAborted("too few replicas committed"), step=self.step)
        return self._failed(progress, progress.fault or too_few)

    def _failed(self, progress: ReplicaProgress, fault: Fault) -> RoundFailed:
        return RoundFailed(
            fault.to_error(),
            replica=progress.replica.name,
            rank=fault.rank,
            step=fault.step,
            waited_s=fault.waited_s or time.monotonic() - self._began_s,
            serving=None if progress.serving is None else str(progress.serving),
        )

    def _abort(self) -> None:
        """Give the round up wherever it is open; note who may still be reading."""
        self._abort_all("the round failed", Deadline.after(ABORT_S))

    def _abort_the_left(self) -> None:
        """The quorum has committed: give the round up where it fell out, without waiting for readers. The next freeze does."""
        self._abort_all("the others went on without it", Deadline.after(0.0))
        for progress in self.parts if self.mark_behind else ():
            if not progress.done:
                _mark_behind(progress, self.order.version)

    def _abort_all(self, reason: str, deadline: Deadline) -> None:
        """All at once: one that does not answer takes no time from the others. What was told to commit ends by itself."""
        opened = [p for p in self.parts if p.round_id is not None and not p.done and not p.unheard]
        if len(opened) == 1:
            _abort_one(opened[0], reason, deadline)
        else:
            list(self.pool.map(lambda progress: _abort_one(progress, reason, deadline), opened))


def _abort_one(progress: ReplicaProgress, reason: str, deadline: Deadline) -> None:
    if progress.round_id is None:
        return
    try:
        progress.readers = bool(progress.replica.abort(progress.round_id, reason, deadline))
    except ReplicaRefused:
        return  # it ended there by itself
    except LiveWeightError:
        progress.readers = True  # out of reach: its lease ends the round, its readers are revoked


def _mark_behind(progress: ReplicaProgress, version: Version) -> None:
    """It hears of it when it listens again; one that is gone begins anew, as it was told to."""
    reason = "the others went on without it" if progress.fault is None else progress.fault.message
    try:
        progress.replica.mark_behind(version, reason, Deadline.after(ABORT_S))
    except (LiveWeightError, ReplicaRefused):
        return
