"""A rank's part of a commit or an undo, from the decision to the known outcome. Runs on the main thread.

Steps: swap shadow and live weights, run the hooks, report to the leader, receive the outcome; if it is not "keep", swap back and run
the hooks again. A version whose content is live already is committed, and undone, without a swap. Each step is noted before the next
one begins, so that the next boundary resumes after any interruption.
Until the outcome is known the rank must not serve, and must not stage into its shadow, which it may have to swap back.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from liveweight.errors import (
    DeadlineExceeded,
    LiveWeightError,
    OutcomeUnknown,
    Torn,
    Unavailable,
    WireError,
    WrongState,
)
from liveweight.rounds.boundary import Decision
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.messages import Message, Refusal, Settled, Swapped
from liveweight.wire.messages.values import Fault, fault_of
from liveweight.worker.shadow_lock import ShadowLock
from liveweight.worker.targets.target import Target

Hook: TypeAlias = Callable[[], None]
"""Run after every swap, also one that goes back: post-processing, graphs, caches. May raise; then all ranks go back."""

GRACE_S = 5.0


class LiveSide(enum.Enum):
    """Which weights are live in the middle of a swap."""

    BEFORE = "those of before"
    AFTER = "those that were staged"
    UNKNOWN = "nobody can say which"


@dataclass(slots=True)
class _Swap:
    """One decision under way: what is live, what failed, the outcome. `hooks_due`: weights changed, and hooks have not run since.
    `swaps`: it is to swap; not so where the content of the version is live already."""

    decision: Decision
    swaps: bool
    began_s: float = field(default_factory=time.monotonic)
    live: LiveSide = LiveSide.BEFORE
    hooks_due: bool = False
    fault: Fault | None = None
    outcome: Settled | None = None


class Committer:
    """Carries out decisions for one rank. Used by the main thread."""

    def __init__(
        self,
        *,
        rank: int,
        seat: int,
        boot: str,
        target: Target,
        hooks: Sequence[Hook],
        channel: Channel[Message],
        shadow_lock: ShadowLock,
    ) -> None:
        self._rank, self._seat, self._boot = rank, seat, boot
        self._target, self._hooks = target, hooks
        self._channel, self._shadow_lock = channel, shadow_lock
        self._current: _Swap | None = None
        self._undo_swaps = True
        """Whether the last commit swapped, so that its undo must, too."""
        self.grace_s = GRACE_S
        """How much longer than the leader a rank waits for its answer."""

    def carry_out(self, decision: Decision) -> Settled:
        """Swap, and receive the outcome. If it raises, the rank must not serve; `resolve` resumes where it stopped."""
        # The staging thread has set `unchanged` before its report, which the leader had before it decided.
        swaps = self._undo_swaps if decision.undo else not self._shadow_lock.unchanged
        self._current = _Swap(decision, swaps)
        deadline = Deadline.after(decision.timeout_s + self.grace_s)
        try:
            with self._shadow_lock.held(deadline.within(decision.timeout_s)):
                self._shadow_lock.doubt = True
                self._swap_and_run_hooks(self._current)
                return self._finish(self._current, deadline)
        except (
            DeadlineExceeded
        ) as error:  # the staging thread does not release the shadow: nothing was swapped
            self._current.fault = fault_of(error, step="commit", rank=self._rank)
            return self._finish(self._current, deadline)

    def resolve(self, timeout_s: float) -> Settled | None:
        """Finish a swap that was interrupted. None: there was none."""
        current = self._current
        if current is None:
            return None
        deadline = Deadline.after(timeout_s)
        with self._shadow_lock.held(deadline):
            done = current.live is LiveSide.AFTER and not current.hooks_due
            if current.outcome is None and current.fault is None and current.swaps and not done:
                current.fault = self._fault(
                    Unavailable("interrupted before it had swapped and run the hooks"), "hooks"
                )
            return self._finish(current, deadline)

    def _swap_and_run_hooks(self, current: _Swap) -> None:
        """Swap and run the hooks. A failure is noted for the report to the leader, whose answer decides whether to swap back."""
        staged, decision = self._shadow_lock.staged, current.decision
        if not decision.undo and (staged is None or staged.epoch != decision.epoch):
            current.fault = self._fault(WrongState("not holding that round's version", "commit"), "commit")
            return
        if not current.swaps:
            return
        try:
            self._swap(current, LiveSide.AFTER)
            self._run_hooks(current)
        except (
            Exception
        ) as error:  # targets and hooks are foreign code: the leader is told whatever they raise
            current.fault = self._fault(error, "hooks" if current.live is LiveSide.AFTER else "commit")

    def _finish(self, current: _Swap, deadline: Deadline) -> Settled:
        """Receive the outcome, unless it is known; swap back if it says so. Only then may the rank serve again."""
        if current.outcome is None:
            current.outcome = self._request_outcome(current, deadline)
        if current.live is LiveSide.UNKNOWN:
            raise Torn(f"rank {self._rank} was interrupted in the middle of a swap; it needs a restart")
        if not current.outcome.keep and current.live is LiveSide.AFTER:
            self._swap(current, LiveSide.BEFORE)
        if current.hooks_due:
            self._run_hooks(current)
        if current.outcome.keep:
            self._undo_swaps = current.swaps
        self._current, self._shadow_lock.staged, self._shadow_lock.doubt = None, None, False
        return current.outcome

    def _swap(self, current: _Swap, to: LiveSide) -> None:
        """One swap. If the target cannot undo a failed one, what is live stays noted as unknown."""
        came_from, current.live = current.live, LiveSide.UNKNOWN
        self._shadow_lock.swaps += 1
        try:
            self._target.swap()
        except Torn:
            raise
        except Exception:
            current.live = came_from  # all or nothing: the target has put everything back
            raise
        current.live, current.hooks_due = to, True

    def _run_hooks(self, current: _Swap) -> None:
        for hook in self._hooks:
            hook()
        current.hooks_due = False

    def _request_outcome(self, current: _Swap, deadline: Deadline) -> Settled:
        seconds = time.monotonic() - current.began_s
        report = Swapped(
            boot=self._boot,
            epoch=current.decision.epoch,
            rank=self._rank,
            seat=self._seat,
            seconds=seconds,
            fault=current.fault,
            unread=self._target.unread,
        )
        return receive_outcome(self._channel, report, deadline, current.live.value)

    def _fault(self, error: Exception, step: str) -> Fault:
        ours = (
            error if isinstance(error, LiveWeightError) else Unavailable(f"{type(error).__name__}: {error}")
        )
        return fault_of(ours, step=step, rank=self._rank)


def receive_outcome(channel: Channel[Message], report: Swapped, deadline: Deadline, held: str) -> Settled:
    """Report to the leader, and receive the outcome. Raises OutcomeUnknown, with what the rank holds, if no answer comes."""
    rank = report.rank
    try:
        answer = channel.request(report, deadline, "the leader to tell the outcome")
    except (DeadlineExceeded, WireError) as error:
        what = f"rank {rank} holds {held} and was not told whether to keep them"
        raise OutcomeUnknown(f"{what}: {error}") from error
    match answer:
        case Settled() as settled:
            return settled
        case Refusal(fault=fault):
            raise OutcomeUnknown(f"rank {rank} requested an outcome: {fault.message}")
        case other:
            raise WrongState("waiting for an outcome", type(other).__name__)
