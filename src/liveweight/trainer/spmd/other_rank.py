"""Any rank but rank 0 of a trainer of several ranks: freezes its shards, reports to rank 0, and gets the round's outcome from rank 0.

Owns the channel to rank 0, which only the training loop's thread uses. The transport source's thread serves engine ranks. An other rank
sends nothing to engines itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LabelInvalid,
    LiveWeightError,
    MessageInvalid,
    OutcomeUnknown,
    RoundFailed,
    WrongState,
)
from liveweight.rounds.fleet import Fleet
from liveweight.rounds.report import Report
from liveweight.rounds.undo_and_verify import Verification
from liveweight.spec.deadline import Deadline
from liveweight.spec.label import checked_label, show
from liveweight.spec.manifest import Version
from liveweight.trainer.settings import PublisherSettings, last_steps_s
from liveweight.trainer.sources.gathering_source import ensure_pass
from liveweight.trainer.spmd.outcomes import decode_outcome
from liveweight.trainer.spmd.rank_zero import TRAINER
from liveweight.trainer.spmd.shard_arena import FrozenShard, ShardArena
from liveweight.wire.channel import Channel
from liveweight.wire.messages import GetOutcome, Message, Outcome, OutcomePending, Refusal, ShardsFrozen
from liveweight.wire.messages.values import Fault, fault_of

GRACE_S = 5.0
"""How much longer than the round this rank waits for rank 0 to send the outcome."""
POLL_S = 1.0
"""How long rank 0 may hold back the answer to one GetOutcome."""
SEND_S = 5.0
NOTHING = FrozenShard(generation=0, lanes=b"", seconds=0.0)
"""What a rank has frozen if it could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    number: int
    version: Version
    deadline: Deadline


class OtherRank:
    """The publisher at a rank other than 0. Every method is for the training loop's thread."""

    def __init__(
        self,
        source: object,
        *,
        rank: int,
        arena: ShardArena,
        channel: Channel[Message],
        name: str,
        run: str,
        engines: int,
        settings: PublisherSettings,
    ) -> None:
        """The arena and the channel are ours to close."""
        self._source, self._arena, self._channel, self._engines = source, arena, channel, engines
        self.settings, self.name, self.run, self.rank = settings, name, run, rank
        self._number = 0
        self._round: _Round | None = None
        self._serving: str | None = None
        self._closed = False

    def offer(self, label: str | int) -> Version:
        """Freeze this rank's shards and report to rank 0; the parameters may change afterwards. All ranks call it, in the same order."""
        with ensure_pass(self._source):
            if self._closed:
                raise WrongState("closed", "offer")
            if self._round is not None:
                self.wait()
            self._number += 1
            label = self._checked_label(label)
            version = Version(run=self.run, label=label)
            deadline = Deadline.after(self.settings.timeout_s)
            try:
                done = self._arena.freeze(str(label))
            except LiveWeightError as error:
                fault = fault_of(error, step="freeze", rank=self.rank)
                self._report(label, NOTHING, fault)
                raise RoundFailed(
                    error,
                    replica=TRAINER,
                    rank=self.rank,
                    step="freeze",
                    waited_s=deadline.waited_s(),
                    serving=self._serving,
                ) from error
            self._report(label, done, None)
            self._round = _Round(number=self._number, version=version, deadline=deadline)
            return version

    def wait(self) -> Report:
        """The outcome of the round that `offer` began, as rank 0 decided it.

        Raises OutcomeUnknown if rank 0 is gone, or does not send the outcome by the round's deadline and a grace period.
        """
        current, self._round = self._round, None
        if current is None:
            raise WrongState("without a round", "wait")
        outcome = self._get_outcome(current)
        self._serving = outcome.serving if outcome.report is None else str(outcome.version)
        return decode_outcome(outcome)

    def undo(self) -> tuple[Version | None, ...]:
        """Raises WrongState: only rank 0 may call it."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "undo")

    def verify(self) -> Verification:
        """Raises WrongState: only rank 0 may call it."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "verify")

    def fleet(self) -> Fleet:
        """Raises WrongState: only rank 0 may call it."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "fleet")

    def catch_up(self) -> Report | None:
        """Raises WrongState: only rank 0 may call it."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "catch_up")

    def close(self) -> None:
        """Release everything. A round that is not staged yet fails, and its error names this rank. May be called twice."""
        self._closed = True
        self._channel.close()
        self._arena.close()

    def _checked_label(self, label: object) -> str | int:
        """The label. An invalid one is reported to rank 0, whose round fails at once: every rank counts the same rounds."""
        try:
            return checked_label(label)
        except LabelInvalid as error:
            self._report(show(label), NOTHING, fault_of(error, step="offer", rank=self.rank))
            raise

    def _report(self, label: str | int, done: FrozenShard, fault: Fault | None) -> None:
        body = ShardsFrozen(
            rank=self.rank,
            number=self._number,
            label=label,
            generation=done.generation,
            lanes=done.lanes,
            seconds=done.seconds,
            fault=fault,
        )
        try:
            self._discard_probes()
            self._channel.send(body, Deadline.after(SEND_S))
        except ChannelClosed as error:
            raise ChannelClosed(
                f"trainer rank 0 is gone, and with it the round of {label}: {error}"
            ) from error

    def _discard_probes(self) -> None:
        """Discard the probes that rank 0 sent while this thread trained: a channel keeps only a limited number of unread messages."""
        while self._channel.receive_now() is not None:
            continue

    def _get_outcome(self, current: _Round) -> Outcome:
        hard_s = current.deadline.ends_s + last_steps_s(self.settings, self._engines) + GRACE_S
        answered_s, begun = current.deadline.began_s, False
        while True:
            try:
                self._discard_probes()
                reply = self._channel.request(
                    GetOutcome(rank=self.rank, number=current.number, wait_s=POLL_S),
                    Deadline.after(POLL_S + GRACE_S),
                    f"trainer rank 0 to report how {current.version} ended",
                )
            except DeadlineExceeded:
                reply = None
            except ChannelClosed as error:
                raise OutcomeUnknown(f"{current.version}: trainer rank 0 is gone: {error}") from error
            match reply:
                case Outcome():
                    return reply
                case OutcomePending():
                    answered_s, begun = time.monotonic(), reply.begun
                case Refusal(fault=fault):
                    raise fault.to_error()
                case None:
                    pass
                case _:
                    raise MessageInvalid(f"trainer rank 0 answered with {type(reply).__name__}")
            now_s = time.monotonic()
            keep_waiting = begun and now_s - answered_s < GRACE_S and now_s < hard_s
            if now_s >= current.deadline.ends_s + GRACE_S and not keep_waiting:
                what = "report how the round ended" if begun else "begin the round"
                raise OutcomeUnknown(
                    f"{current.version}: {current.deadline.exceeded(f'trainer rank 0 to {what}')}"
                )
