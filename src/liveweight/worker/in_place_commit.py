"""A rank's part of a commit in place, from the decision to the known outcome. Runs on the main thread.

Steps: have the staging thread overwrite the live weights, run the hooks, report to the leader, receive the outcome. There is no way
back: if any rank wrote and not all are done, all are torn. Each step is noted before the next one begins, so that the next boundary
resumes after any interruption.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from liveweight.errors import LiveWeightError, Unavailable, WrongState
from liveweight.rounds.boundary import Decision
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.messages import Message, Settled, Swapped
from liveweight.wire.messages.values import Fault, Overwritten, fault_of
from liveweight.worker.commit import GRACE_S, Hook, receive_outcome
from liveweight.worker.in_place_overwrite import OverwriteQueue, OverwriteRequest
from liveweight.worker.shadow_lock import ShadowLock


@dataclass(slots=True)
class _Commit:
    """One decision under way: the result of the overwriting, what failed, the outcome."""

    decision: Decision
    began_s: float = field(default_factory=time.monotonic)
    request: OverwriteRequest | None = None
    done: Overwritten | None = None
    hooks_due: bool = False
    fault: Fault | None = None
    outcome: Settled | None = None


class InPlaceCommitter:
    """Carries out decisions for one rank that has no shadow. Used by the main thread."""

    def __init__(
        self,
        *,
        rank: int,
        seat: int,
        boot: str,
        hooks: Sequence[Hook],
        channel: Channel[Message],
        shadow_lock: ShadowLock,
        overwrites: OverwriteQueue,
    ) -> None:
        self._rank, self._seat, self._boot = rank, seat, boot
        self._hooks, self._channel, self._shadow_lock = hooks, channel, shadow_lock
        self._overwrites = overwrites
        self._current: _Commit | None = None
        self.grace_s = GRACE_S
        """How much longer than the leader a rank waits for its answer."""

    def carry_out(self, decision: Decision) -> Settled:
        """Overwrite, and receive the outcome. If it raises, the rank must not serve; `resolve` resumes where it stopped."""
        self._current = current = _Commit(decision)
        self._shadow_lock.doubt = True
        return self._finish(current, Deadline.after(decision.timeout_s + self.grace_s))

    def resolve(self, timeout_s: float) -> Settled | None:
        """Finish a commit that was interrupted. None: there was none."""
        current = self._current
        if current is None:
            return None
        if current.hooks_due and current.fault is None:
            current.fault = self._fault(Unavailable("interrupted before the hooks had run"), "hooks")
        return self._finish(current, Deadline.after(timeout_s))

    def _finish(self, current: _Commit, deadline: Deadline) -> Settled:
        if current.done is None:
            self._overwrite(current)
        if current.outcome is None:
            current.outcome = self._request_outcome(current, deadline)
        self._current, self._shadow_lock.staged, self._shadow_lock.doubt = None, None, False
        return current.outcome

    def _overwrite(self, current: _Commit) -> None:
        """Have live weights overwritten and run the hooks. A failure is noted for the report to the leader."""
        if current.decision.undo:
            current.done = Overwritten(begun=False)
            current.fault = self._fault(WrongState("in place, where nothing is kept", "undo"), "commit")
            return
        staged = self._shadow_lock.staged
        if self._shadow_lock.unchanged and staged is not None and staged.epoch == current.decision.epoch:
            current.done = Overwritten(begun=False)  # what is live has the version's content
            return
        if current.request is None:
            self._shadow_lock.swaps += 1
            until = Deadline.after(current.decision.timeout_s)
            current.request = self._overwrites.submit(current.decision.epoch, until)
        done, current.fault = current.request.wait(self._rank)
        current.hooks_due, current.done = current.fault is None, done
        self._shadow_lock.swaps += 1  # for readers that began in the middle
        try:
            for hook in self._hooks if current.hooks_due else ():
                hook()
        except Exception as error:  # foreign code: the leader is told whatever it raises
            current.fault = self._fault(error, "hooks")
        current.hooks_due = False

    def _request_outcome(self, current: _Commit, deadline: Deadline) -> Settled:
        report = Swapped(
            boot=self._boot,
            epoch=current.decision.epoch,
            rank=self._rank,
            seat=self._seat,
            seconds=time.monotonic() - current.began_s,
            fault=current.fault,
            overwritten=current.done,
        )
        written = current.done is not None and current.done.begun
        held = "weights that were overwritten" if written else "those of before"
        return receive_outcome(self._channel, report, deadline, held)

    def _fault(self, error: Exception, step: str) -> Fault:
        ours = (
            error if isinstance(error, LiveWeightError) else Unavailable(f"{type(error).__name__}: {error}")
        )
        return fault_of(ours, step=step, rank=self._rank)
