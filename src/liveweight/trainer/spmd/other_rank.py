"""Any other rank of a trainer of several: freezes its shards, reports that to rank 0, and learns from it how the round ended.

Owns the channel to rank 0, used by the training loop's thread alone; engine ranks are served by the transport source's. It speaks to
no engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
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
from liveweight.spec.manifest import Version
from liveweight.trainer.settings import PublisherSettings, last_steps_s
from liveweight.trainer.sources.gathering_source import owed
from liveweight.trainer.spmd.outcomes import decode_outcome
from liveweight.trainer.spmd.rank_zero import TRAINER
from liveweight.trainer.spmd.shard_arena import FrozenShard, ShardArena
from liveweight.wire.channel import Channel
from liveweight.wire.messages import GetOutcome, Message, Outcome, OutcomePending, Refusal, ShardsFrozen
from liveweight.wire.messages.values import Fault, fault_of

GRACE_S = 5.0
"""How much longer than the round this rank waits for rank 0 to say how it ended."""
ASK_S = 1.0
"""How long one question waits for its answer at rank 0."""
SEND_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    number: int
    version: Version
    deadline: Deadline


class OtherRank:
    """A publisher's part at a rank other than 0. Every method is for the training loop's thread."""

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
        """Freeze the shards that are here, and say so; they may change now. All ranks call it, in the same order."""
        with owed(self._source):
            if self._closed:
                raise WrongState("closed", "offer")
            if self._round is not None:
                self.wait()
            self._number += 1
            version = Version(run=self.run, label=label)
            deadline = Deadline.after(self.settings.timeout_s)
            try:
                done = self._arena.freeze(str(label))
            except LiveWeightError as error:
                fault = fault_of(error, step="freeze", rank=self.rank)
                self._report(label, FrozenShard(generation=0, lanes=b"", seconds=0.0), fault)
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

        OutcomeUnknown where rank 0 is gone, or does not say it by the round's deadline and a grace.
        """
        current, self._round = self._round, None
        if current is None:
            raise WrongState("without a round", "wait")
        outcome = self._learn(current)
        self._serving = outcome.serving if outcome.report is None else str(outcome.version)
        return decode_outcome(outcome)

    def undo(self) -> tuple[Version | None, ...]:
        """Rank 0's alone."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "undo")

    def verify(self) -> Verification:
        """Rank 0's alone."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "verify")

    def fleet(self) -> Fleet:
        """Rank 0's alone."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "fleet")

    def catch_up(self) -> Report | None:
        """Rank 0's alone."""
        raise WrongState(f"rank {self.rank} of a trainer, whose rank 0 speaks to the engines", "catch_up")

    def close(self) -> None:
        """Let go of everything: a round that is not staged yet fails, and names this rank. Twice is fine."""
        self._closed = True
        self._channel.close()
        self._arena.close()

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
            self._pass_over_probes()
            self._channel.send(body, Deadline.after(SEND_S))
        except ChannelClosed as error:
            raise ChannelClosed(
                f"trainer rank 0 is gone, and with it the round of {label}: {error}"
            ) from error

    def _pass_over_probes(self) -> None:
        """Rank 0 looked after us while this thread trained; a channel keeps only so much that nobody reads."""
        while self._channel.receive_now() is not None:
            continue

    def _learn(self, current: _Round) -> Outcome:
        hard_s = current.deadline.ends_s + last_steps_s(self.settings, self._engines) + GRACE_S
        heard_s, begun = current.deadline.began_s, False
        while True:
            try:
                self._pass_over_probes()
                reply = self._channel.request(
                    GetOutcome(rank=self.rank, number=current.number, wait_s=ASK_S),
                    Deadline.after(ASK_S + GRACE_S),
                    f"trainer rank 0 to say how {current.version} ended",
                )
            except DeadlineExceeded:
                reply = None
            except ChannelClosed as error:
                raise OutcomeUnknown(f"{current.version}: trainer rank 0 is gone: {error}") from error
            match reply:
                case Outcome():
                    return reply
                case OutcomePending():
                    heard_s, begun = time.monotonic(), reply.begun
                case Refusal(fault=fault):
                    raise fault.to_error()
                case None:
                    pass
                case _:
                    raise MessageInvalid(f"trainer rank 0 answered with {type(reply).__name__}")
            now_s = time.monotonic()
            waits_on = begun and now_s - heard_s < GRACE_S and now_s < hard_s
            if now_s >= current.deadline.ends_s + GRACE_S and not waits_on:
                what = "say how the round ended" if begun else "begin the round"
                raise OutcomeUnknown(
                    f"{current.version}: {current.deadline.exceeded(f'trainer rank 0 to {what}')}"
                )
