"""The coordinator: one round over all replicas: open, stage, verify, vote, commit; or abort, and report what failed where.

No replica commits unless the quorum voted yes. The offer, and when its memory may change again, is trainer/offers's; which version
comes next is the publisher's. What a replica decides on its own is rounds/leader's.
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
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, fault_of

POLL_S = 0.5
"""How often a long wait checks whether the publisher is being closed."""
MARGIN_S = 5.0
"""How much longer than the publisher a replica waits: the publisher gives up first."""
ABORT_S = 2.0
"""How long the replicas of a failed round may take to stop reading."""
REPLICA_STATE_S = 5.0


@dataclass(slots=True)
class RoundCoordinator:
    """A round under way. Run once, by the publisher's thread.

    `meanwhile` is called once the round is open, while ranks stage; `poll`, now and then until all have staged; `on_staged`, once they have
    (it may return digests that the round was opened without); `before_vote`, once they have verified. An error in these ends the round
    before the vote. `patience` limits how long a replica may take to stage and verify if the quorum is possible without it: the others then
    vote. With `mark_behind`, a replica that is left behind takes no requests until it has caught up.
    `on_read` is called when no rank reads the source any more: once all have staged or, if a replica updates in place, after the commit.
    """

    replicas: Sequence[ReplicaProgress]
    order: m.Open
    description: m.Describe
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
        """Take every replica of the quorum to the version, or none. Raises RoundFailed with the first failure, or OutcomeUnknown if a
        replica did not answer a commit."""
        try:
            self._run_steps()
        except (RoundFailed, OutcomeUnknown):
            self._abort()
            raise
        except LiveWeightError as error:
            self._abort()
            raise self._failed(self.replicas[0], fault_of(error, step=self.step)) from error
        except BaseException:
            self._abort()
            raise
        self._abort_left_behind()

    def _run_steps(self) -> None:
        self._each("open", self._open)
        self.meanwhile()
        if all(progress.unchanged for progress in self._active()):
            return
        self._each("stage", lambda progress: self._wait_until(progress, "staged"))
        if self.patience is not None and self.patience.over:
            self.patience = None  # a slow replica used it up: the others verify within the round's deadline
        digests = self.on_staged()
        in_place = any(progress.in_place for progress in self._active())
        if not in_place:
            self.on_read()
        self._each("verify", lambda progress: self._verified(progress, digests))
        self.step = "vote"
        self.before_vote()
        began_s = time.monotonic()
        lease = Deadline.after(
            self.lease_s
        )  # started before any vote is requested: the coordinator gives up first
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
            # Its ranks were replaced, it was absent when the manifest was described, or its kept tensors have changed since.
            progress.replica.describe(self.description, self._patience)
            opened = progress.replica.open(self.order, self._patience)
        progress.on_opened(opened)

    def _verified(self, progress: ReplicaProgress, digests: bytes | None) -> None:
        if digests is not None and progress.round_id is not None:
            within = Deadline.after(max(POLL_S, self._patience.remaining_s()))
            progress.replica.compare(progress.round_id, digests, within)
        self._wait_until(progress, "verified")

    def _wait_until(self, progress: ReplicaProgress, phase: m.Phase) -> None:
        """Wait until a replica has reached that phase. A failure or the deadline takes the replica out of the round."""
        while progress.round_id is not None:
            try:
                # Counted from now, also if a slow replica used up the time: a replica that has come that far answers at once.
                within = Deadline.after(min(POLL_S, self._patience.remaining_s()))
                progress.reached = progress.replica.status(progress.round_id, phase, within)
            except DeadlineExceeded:
                if self._patience.over:
                    raise self._silent(progress, phase) from None
                continue  # no answer: its process was stopped for a moment
            if progress.reached.fault is not None:
                raise ReplicaRefused(progress.reached.fault, progress.serving)
            if m.ORDER[progress.reached.phase] >= m.ORDER[phase]:
                return
            if self.closing():
                raise RoundAborted("the publisher was closed")
            if phase == "staged":
                self._poll(progress)
            if self._patience.over:
                raise self._late(progress, progress.reached, phase)

    def _poll(self, progress: ReplicaProgress) -> None:
        """What fails here is the source. The replica answered, so the error is not that of a silent one."""
        try:
            self.poll()
        except LiveWeightError as error:
            raise ReplicaRefused(fault_of(error, step="stage"), progress.serving) from error

    @property
    def _patience(self) -> Deadline:
        """Until when to wait for a replica: the round's deadline, if every replica is needed."""
        spare = len(self.replicas) > self.quorum
        return self.patience if spare and self.patience is not None else self.deadline

    def _silent(self, progress: ReplicaProgress, phase: m.Phase) -> DeadlineExceeded:
        """The error names the whole time of the wait, not that of the last request."""
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
        for progress in self.replicas:
            if progress.unanswered:
                self._check_outcome(progress)
        unanswered = [progress.replica.name for progress in self.replicas if progress.unanswered]
        if sum(progress.done for progress in self.replicas) >= self.quorum:
            return
        if unanswered:
            raise OutcomeUnknown(f"{', '.join(unanswered)} was told to commit and did not answer")
        raise self._failure()

    def _commit_one(self, progress: ReplicaProgress, deadline: Deadline) -> None:
        if progress.round_id is None:
            return
        try:
            progress.committed = progress.replica.commit(progress.round_id, deadline)
        except (DeadlineExceeded, WireError, RoundAborted):  # RoundAborted: interrupted while it waited
            progress.unanswered = True
            raise

    def _check_outcome(self, progress: ReplicaProgress) -> None:
        """The answer to a commit was lost: learn the outcome from what the replica serves now, if it can be reached."""
        try:
            replica_state = progress.replica.replica_state(Deadline.after(REPLICA_STATE_S))
        except (LiveWeightError, ReplicaRefused):
            return
        if replica_state.round == progress.round_id:
            return  # still at it
        progress.unanswered, progress.silent, progress.serving = False, False, replica_state.serving
        if replica_state.serving is not None and replica_state.serving.same_name(self.order.version):
            progress.committed = m.Committed(
                serving=replica_state.serving, undo=replica_state.undo, stall_s=0.0
            )
            progress.fault = None
        elif replica_state.torn is not None:
            progress.fault = fault_of(Torn(replica_state.torn), step="commit")

    def _active(self) -> list[ReplicaProgress]:
        return [progress for progress in self.replicas if progress.fault is None]

    def _each(self, name: str, step: Callable[[ReplicaProgress], None], *, keep_going: bool = False) -> None:
        """Run one step on all active replicas at once. The round fails if fewer than the quorum remain."""
        self.step = name
        active = self._active()
        if len(active) == 1:
            self._try(name, step, active[0])
        else:
            list(self.pool.map(lambda progress: self._try(name, step, progress), active))
        if self.closing() and not keep_going:
            raise RoundAborted("the publisher was closed")
        if len(self._active()) < self.quorum and not keep_going:
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
            progress.silent = progress.readers = isinstance(error, DeadlineExceeded | ChannelClosed)
            progress.fail(fault_of(error, step=name, waited_s=waited_s))

    def _failure(self) -> RoundFailed:
        """The error of the replica that failed first."""
        out = [
            (progress.failed_s, number)
            for number, progress in enumerate(self.replicas)
            if progress.fault is not None
        ]
        progress = self.replicas[min(out)[1]] if out else self.replicas[0]
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
            answers=not progress.silent,
        )

    def _abort(self) -> None:
        """Abort the round wherever it is open; note which replicas may still be reading."""
        self._abort_all("the round failed", Deadline.after(ABORT_S))

    def _abort_left_behind(self) -> None:
        """The quorum has committed: abort the round at the other replicas, without waiting for readers. The next freeze waits for them."""
        self._abort_all("the others went on without it", Deadline.after(0.0))
        for progress in self.replicas if self.mark_behind else ():
            if not progress.done:
                _mark_behind(progress, self.order.version)

    def _abort_all(self, reason: str, deadline: Deadline) -> None:
        """Abort all at once: a replica that does not answer delays no other. A replica that was told to commit ends the round by itself."""
        opened = [p for p in self.replicas if p.round_id is not None and not p.done and not p.unanswered]
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
        return  # the round has ended there by itself
    except LiveWeightError:
        progress.readers = True  # out of reach: its vote lease ends the round, its readers are revoked


def _mark_behind(progress: ReplicaProgress, version: Version) -> None:
    """Best effort: a replica that stopped reads the message when it goes on; a restarted one begins with its start version."""
    reason = "the others went on without it" if progress.fault is None else progress.fault.message
    try:
        progress.replica.mark_behind(version, reason, Deadline.after(ABORT_S))
    except (LiveWeightError, ReplicaRefused):
        return
