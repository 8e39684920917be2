"""The committer: a rank's part of a commit or an undo, from the decision to the known outcome. Runs on the main thread.

Beats: exchange shadow and live weights, run the hooks, tell the leader, hear the outcome; if it is not "keep", exchange back and run
the hooks again. Until the outcome is known the rank must not serve; if it cannot be learned in time, the rank is in doubt and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from liveweight.errors import (
    DeadlineExceeded,
    LiveWeightError,
    OutcomeUnknown,
    Unavailable,
    WireError,
    WrongState,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.messages import Message, Refusal, Settled, Swapped
from liveweight.wire.values import Fault, fault_of
from liveweight.worker.agent import Turnstile
from liveweight.worker.boundary import Decision
from liveweight.worker.target import Target

Hook: TypeAlias = Callable[[], None]
"""Run after every exchange, also one that goes back: post-processing, graphs, caches. May raise; then all ranks go back."""

GRACE_S = 5.0


class Committer:
    """Carries out decisions for one rank. Used by the main thread."""

    def __init__(
        self,
        *,
        rank: int,
        boot: str,
        target: Target,
        hooks: Sequence[Hook],
        channel: Channel[Message],
        turnstile: Turnstile,
    ) -> None:
        self._rank, self._boot, self._target, self._hooks = rank, boot, target, hooks
        self._channel, self._turnstile = channel, turnstile
        self._undecided: Swapped | None = None

    def carry_out(self, decision: Decision) -> Settled:
        """Exchange, and learn the outcome. OutcomeUnknown leaves the rank in doubt: ask `resolve` before serving."""
        deadline = Deadline.after(decision.timeout_s + GRACE_S)
        began_s = time.monotonic()
        try:
            with self._turnstile.held(deadline.within(decision.timeout_s)):
                fault = self._exchange(decision)
                return self._learn(self._report(decision.epoch, began_s, fault), deadline)
        except DeadlineExceeded as error:
            fault = fault_of(error, step="commit", rank=self._rank)
            return self._learn(self._report(decision.epoch, began_s, fault), deadline)

    def resolve(self, timeout_s: float) -> Settled | None:
        """If the last outcome is unknown, ask again. None: there was no doubt."""
        if self._undecided is None:
            return None
        with self._turnstile.lock:
            return self._learn(self._undecided, Deadline.after(timeout_s))

    def _exchange(self, decision: Decision) -> Fault | None:
        """Exchange and run the hooks; on failure go back and say why."""
        staged = self._turnstile.staged
        if not decision.undo and (staged is None or staged.epoch != decision.epoch):
            error = WrongState("not holding that round's version", "commit")
            return fault_of(error, step="commit", rank=self._rank)
        try:
            self._target.swap()
        except (
            Exception
        ) as error:  # the target is foreign code: it exchanged nothing, and the leader must hear why
            return fault_of(_translated(error), step="commit", rank=self._rank)
        try:
            self._run_hooks()
        except Exception as failure:  # whatever a hook raises, the weights go back
            self._back()
            return fault_of(_translated(failure), step="hooks", rank=self._rank)
        return None

    def _report(self, epoch: int, began_s: float, fault: Fault | None) -> Swapped:
        seconds = time.monotonic() - began_s
        return Swapped(boot=self._boot, epoch=epoch, rank=self._rank, seconds=seconds, fault=fault)

    def _learn(self, report: Swapped, deadline: Deadline) -> Settled:
        """Tell the leader and hear what all ranks do; go back if that is the outcome."""
        self._undecided, self._turnstile.doubt = report, True
        try:
            answer = self._channel.request(report, deadline, "the leader to tell the outcome")
        except (DeadlineExceeded, WireError) as error:
            what = f"rank {self._rank} exchanged its weights and did not hear whether to keep them"
            raise OutcomeUnknown(f"{what}: {error}") from error
        match answer:
            case Settled() as settled:
                if report.fault is None and not settled.keep:
                    self._back()
                self._undecided, self._turnstile.doubt = None, False
                self._turnstile.staged = None
                return settled
            case Refusal(fault=fault):
                raise fault.to_error()
            case other:
                raise WrongState("waiting for an outcome", type(other).__name__)

    def _back(self) -> None:
        self._target.swap()
        self._run_hooks()

    def _run_hooks(self) -> None:
        for hook in self._hooks:
            hook()


def _translated(error: Exception) -> LiveWeightError:
    return error if isinstance(error, LiveWeightError) else Unavailable(f"{type(error).__name__}: {error}")
