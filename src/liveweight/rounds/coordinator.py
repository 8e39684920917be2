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

    `meanwhile` is called once the round is open, while ranks stage; `look`, now and then until they have; `on_staged`, once they have (it
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
    look: Callable[[], None] = lambda: None
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
        if all(part.unchanged for part in self._in()):
            return
        self._each("stage", lambda part: self._until(part, "staged"))
        if self.patience is not None and self.patience.over:
            self.patience = None  # one that lagged had it all: the others verify in the round's own time
        digests = self.on_staged()
        in_place = any(part.in_place for part in self._in())
        if not in_place:
            self.on_read()
        self._each("verify", lambda part: self._verified(part, digests))
        self.step = "vote"
        self.before_vote()
        began_s = time.monotonic()
        lease = Deadline.after(self.lease_s)  # started before anyone is asked: we give up first
        self._each("vote", lambda part: self._vote(part, lease))
        self.vote_s = time.monotonic() - began_s
        lease.check("the votes")
        self._commit()
        if in_place:
            self.on_read()

    def _open(self, part: ReplicaProgress) -> None:
        try:
            opened = part.replica.open(self.order, self._patience)
        except ReplicaRefused as refused:
            if refused.fault.code != ManifestInvalid.code:
                raise
            # Its ranks were replaced, or it was not there when the others were told.
            part.replica.describe(self.order.structure, self.manifest, self._patience)
            opened = part.replica.open(self.order, self._patience)
        part.opened(opened)

    def _verified(self, part: ReplicaProgress, digests: bytes | None) -> None:
        if digests is not None and part.round_id is not None:
            within = Deadline.after(max(LOOK_S, self._patience.remaining_s()))
            part.replica.compare(part.round_id, digests, within)
        self._until(part, "verified")

    def _until(self, part: ReplicaProgress, phase: m.Phase) -> None:
        """Wait until a replica has come that far; its failure, or the deadline, puts it out of the round."""
        while part.round_id is not None:
            try:
                # From now, also where one that lags took all the time: who has come that far says so at once.
                look = Deadline.after(min(LOOK_S, self._patience.remaining_s()))
                part.progress = part.replica.status(part.round_id, phase, look)
            except DeadlineExceeded:
                if self._patience.over:
                    raise self._silent(part, phase) from None
                continue  # no news: its process stood still for a moment
            if part.progress.fault is not None:
                raise ReplicaRefused(part.progress.fault, part.serving)
            if m.ORDER[part.progress.phase] >= m.ORDER[phase]:
                return
            if self.closing():
                raise RoundAborted("the publisher was closed")
            if phase == "staged":
                self.look()
            if self._patience.over:
                raise self._late(part, part.progress, phase)

    @property
    def _patience(self) -> Deadline:
        """Until when replicas are waited for: all of the round's time, where each of them is needed."""
        spare = len(self.parts) > self.quorum
        return self.patience if spare and self.patience is not None else self.deadline

    def _silent(self, part: ReplicaProgress, phase: m.Phase) -> DeadlineExceeded:
        """The whole time that it was waited for, not that of the last question."""
        return self._patience.exceeded(f"{part.replica.name} to be {phase}")

    def _late(self, part: ReplicaProgress, progress: m.Progress, phase: m.Phase) -> ReplicaRefused:
        missing = progress.missing
        who = f"rank {', '.join(map(str, missing))} of {part.replica.name}"
        late = self._patience.exceeded(f"{who} to be {phase}")
        part.readers = bool(progress.readers)
        step = "stage" if phase == "staged" else "verify"
        rank = missing[0] if len(missing) == 1 else None
        return ReplicaRefused(fault_of(late, step=step, rank=rank, waited_s=late.waited_s), part.serving)

    def _vote(self, part: ReplicaProgress, lease: Deadline) -> None:
        if part.round_id is not None:
            part.replica.vote(part.round_id, self.lease_s, lease)

    def _commit(self) -> None:
        began_s = time.monotonic()
        deadline = Deadline.after(max(self.deadline.remaining_s(), self.lease_s))
        self._each("commit", lambda part: self._commit_one(part, deadline), keep_going=True)
        self.commit_s = time.monotonic() - began_s
        for part in self.parts:
            if part.unheard:
                self._ask_again(part)
        unheard = [part.replica.name for part in self.parts if part.unheard]
        if sum(part.done for part in self.parts) >= self.quorum:
            return
        if unheard:
            raise OutcomeUnknown(f"{', '.join(unheard)} was told to commit and did not answer")
        raise self._failure()

    def _commit_one(self, part: ReplicaProgress, deadline: Deadline) -> None:
        if part.round_id is None:
            return
        try:
            part.committed = part.replica.commit(part.round_id, deadline)
        except (DeadlineExceeded, WireError, RoundAborted):  # the last: interrupted while it waited
            part.unheard = True
            raise

    def _ask_again(self, part: ReplicaProgress) -> None:
        """The answer to a commit was lost: what the replica serves now tells, if it can be reached."""
        try:
            standing = part.replica.standing(Deadline.after(STANDING_S))
        except (LiveWeightError, ReplicaRefused):
            return
        if standing.round == part.round_id:
            return  # still at it
        part.unheard, part.serving = False, standing.serving
        if standing.serving is not None and standing.serving.same_name(self.order.version):
            part.committed = m.Committed(serving=standing.serving, undo=standing.undo, stall_s=0.0)
            part.fault = None
        elif standing.torn is not None:
            part.fault = fault_of(Torn(standing.torn), step="commit")

    def _in(self) -> list[ReplicaProgress]:
        return [part for part in self.parts if part.fault is None]

    def _each(self, name: str, step: Callable[[ReplicaProgress], None], *, keep_going: bool = False) -> None:
        """One step on every replica that is still in, all at once; below the quorum the round fails."""
        self.step = name
        parts = self._in()
        if len(parts) == 1:
            self._try(name, step, parts[0])
        else:
            list(self.pool.map(lambda part: self._try(name, step, part), parts))
        if self.closing() and not keep_going:
            raise RoundAborted("the publisher was closed")
        if len(self._in()) < self.quorum and not keep_going:
            raise self._failure()

    def _try(self, name: str, step: Callable[[ReplicaProgress], None], part: ReplicaProgress) -> None:
        try:
            step(part)
        except ReplicaRefused as refused:
            torn = refused.fault.code == Torn.code
            part.serving = part.serving if refused.serving is None and not torn else refused.serving
            part.fail(refused.fault)
        except LiveWeightError as error:
            waited_s = error.waited_s if isinstance(error, DeadlineExceeded) else 0.0
            part.readers = isinstance(error, DeadlineExceeded | ChannelClosed)
            part.fail(fault_of(error, step=name, waited_s=waited_s))

    def _failure(self) -> RoundFailed:
        """What failed first."""
        out = [(part.failed_s, number) for number, part in enumerate(self.parts) if part.fault is not None]
        part = self.parts[min(out)[1]] if out else self.parts[0]
        too_few = fault_of(RoundAborted("too few replicas committed"), step=self.step)
        return self._failed(part, part.fault or too_few)

    def _failed(self, part: ReplicaProgress, fault: Fault) -> RoundFailed:
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
        self._abort_all("the round failed", Deadline.after(ABORT_S))

    def _abort_the_left(self) -> None:
        """The quorum has committed: give the round up where it fell out, without waiting for readers. The next freeze does."""
        self._abort_all("the others went on without it", Deadline.after(0.0))
        for part in self.parts if self.mark_behind else ():
            if not part.done:
                _mark_behind(part, self.order.version)

    def _abort_all(self, reason: str, deadline: Deadline) -> None:
        """All at once: one that does not answer takes no time from the others. What was told to commit ends by itself."""
        opened = [p for p in self.parts if p.round_id is not None and not p.done and not p.unheard]
        if len(opened) == 1:
            _abort_one(opened[0], reason, deadline)
        else:
            list(self.pool.map(lambda part: _abort_one(part, reason, deadline), opened))


def _abort_one(part: ReplicaProgress, reason: str, deadline: Deadline) -> None:
    if part.round_id is None:
        return
    try:
        part.readers = bool(part.replica.abort(part.round_id, reason, deadline))
    except ReplicaRefused:
        return  # it ended there by itself
    except LiveWeightError:
        part.readers = True  # out of reach: its lease ends the round, its readers are revoked


def _mark_behind(part: ReplicaProgress, version: Version) -> None:
    """It hears of it when it listens again; one that is gone begins anew, as it was told to."""
    reason = "the others went on without it" if part.fault is None else part.fault.message
    try:
        part.replica.mark_behind(version, reason, Deadline.after(ABORT_S))
    except (LiveWeightError, ReplicaRefused):
        return
