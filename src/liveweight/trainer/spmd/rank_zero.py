"""Rank 0 of a trainer of several ranks: freezes its own shards like every other, and drives the rounds for all.

Owns a background thread, in which a round waits for the other ranks' reports and then runs as with a trainer of one process. The outcome
of that round is the outcome for all ranks; the rank server (rank_server.py) sends it to them. The other ranks are in other_rank.py.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from liveweight.errors import (
    DeadlineExceeded,
    LabelInvalid,
    LiveWeightError,
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
from liveweight.trainer.fleet_publisher import FleetPublisher
from liveweight.trainer.offers.sharded import ShardedOffers
from liveweight.trainer.settings import PublisherSettings, last_steps_s
from liveweight.trainer.sources.gathering_source import ensure_pass
from liveweight.trainer.spmd.outcomes import encode_outcome
from liveweight.trainer.spmd.rank_server import RankRefused, RankServer
from liveweight.trainer.spmd.shard_arena import ShardArena
from liveweight.transports.sharded import ShardServer
from liveweight.wire.messages import ShardsFrozen
from liveweight.wire.messages.values import Fault, fault_of

TRAINER = "the trainer"
"""The replica that a RoundFailed names when the round failed before it reached an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    number: int
    version: Version
    frozen: ShardsFrozen
    deadline: Deadline
    began_s: float


class RankZero:
    """The publisher at rank 0. Every method is for the training loop's thread."""

    def __init__(
        self,
        source: object,
        *,
        arena: ShardArena,
        rank_server: RankServer,
        shard_server: ShardServer,
        offers: ShardedOffers,
        publisher: FleetPublisher,
        serving: str | None,
    ) -> None:
        """`publisher` runs the rounds, in the background thread. RankZero closes its arguments. `serving`: what the engines serve."""
        self._source = source
        self._arena = arena
        self._rank_server = rank_server
        self._shard_server = shard_server
        self._offers, self._publisher, self._serving = offers, publisher, serving
        self.settings: PublisherSettings = publisher.settings
        self.name, self.run, self.rank = publisher.name, publisher.run, 0
        self._number = 0
        self._round: tuple[_Round, Future[Report]] | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="liveweight-rank-0")

    def offer(self, label: str | int) -> Version:
        """Begin a round; returns once the shards that are here are frozen: they may change now. All ranks call it, in the same order."""
        with ensure_pass(self._source):
            if self._closing.is_set():
                raise WrongState("closed", "offer")
            if self._round is not None:
                self.wait()  # an unwaited failure is raised here
            self._number += 1
            deadline = Deadline.after(self.settings.timeout_s)
            began_s = time.monotonic()
            self._rank_server.begin(self._number)
            version = Version(run=self.run, label=self._checked_label(label, deadline))
            frozen = self._freeze(version, deadline)
            current = _Round(
                number=self._number, version=version, frozen=frozen, deadline=deadline, began_s=began_s
            )
            self._round = current, self._thread.submit(self._run, current)
            return version

    def wait(self) -> Report:
        """The outcome of the round that `offer` began."""
        current, self._round = self._round, None
        if current is None:
            raise WrongState("without a round", "wait")
        begun, outcome = current
        limit_s = begun.deadline.remaining_s() + last_steps_s(self.settings, self._publisher.engines)
        try:
            return outcome.result(limit_s)
        except FutureTimeout:
            raise OutcomeUnknown(f"{begun.version}: the round did not end in time") from None

    def undo(self) -> tuple[Version | None, ...]:
        """See FleetPublisher."""
        self._wait_for_round()
        return self._publisher.undo()

    def verify(self) -> Verification:
        """See FleetPublisher."""
        self._wait_for_round()
        return self._publisher.verify()

    def fleet(self) -> Fleet:
        """See FleetPublisher."""
        self._wait_for_round()
        return self._publisher.fleet()

    def catch_up(self) -> Report | None:
        """See FleetPublisher."""
        self._wait_for_round()
        return self._publisher.catch_up()

    def close(self) -> None:
        """Abort a round that is not committed yet, tell the other ranks, and release everything. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._rank_server.interrupt()
        self._publisher.close()
        self._thread.shutdown(wait=True)
        self._rank_server.close()
        self._shard_server.close()
        self._arena.close()

    def _wait_for_round(self) -> None:
        if self._round is not None:
            self.wait()

    def _checked_label(self, label: object, deadline: Deadline) -> str | int:
        """The label. An invalid one ends the round for all ranks, so that every rank counts the same rounds."""
        try:
            return checked_label(label)
        except LabelInvalid as error:
            failed = self._failed(fault_of(error, step="offer", rank=0), deadline)
            version = Version(run=self.run, label=show(label))
            self._rank_server.conclude(encode_outcome(self._number, version, failed))
            raise

    def _freeze(self, version: Version, deadline: Deadline) -> ShardsFrozen:
        """Freeze this rank's shards and return its report. An error is the round's outcome for all ranks."""
        try:
            done = self._arena.freeze(str(version.label))
        except BaseException as error:
            fault = fault_of(error, step="freeze", rank=0) if isinstance(error, LiveWeightError) else None
            failed = error if fault is None else self._failed(fault, deadline)
            self._rank_server.conclude(encode_outcome(self._number, version, failed))
            raise failed from error
        return ShardsFrozen(
            rank=0,
            number=self._number,
            label=version.label,
            generation=done.generation,
            lanes=done.lanes,
            seconds=done.seconds,
        )

    def _run(self, current: _Round) -> Report:
        """Run the whole round, in the background thread. The other ranks get its outcome before the training loop does."""
        end: Report | BaseException
        try:
            end = self._drive(current)
        except RankRefused as refused:
            end = self._failed(refused.fault, current.deadline)
        except BaseException as error:
            end = error
        if isinstance(end, Report):
            self._serving = str(end.version)
        elif isinstance(end, RoundFailed):
            self._serving = end.serving
        self._rank_server.conclude(encode_outcome(current.number, current.version, end))
        if isinstance(end, Report):
            return end
        raise end

    def _drive(self, current: _Round) -> Report:
        label, deadline = current.version.label, current.deadline
        with self._rank_server.watching():
            reports = self._rank_server.wait_for_frozen(label, deadline)
            self._offers.set_frozen({0: current.frozen, **reports})
            self._publisher.settings = dataclasses.replace(self.settings, timeout_s=deadline.remaining_s())
            try:
                report = self._publisher.publish(label)
            except RoundFailed as failed:
                named = self._naming_silent_ranks(failed)
                if named is failed:
                    raise
                raise named from failed
        return dataclasses.replace(report, total_s=time.monotonic() - current.began_s)

    def _naming_silent_ranks(self, failed: RoundFailed) -> RoundFailed:
        """Name the silent ranks of this trainer, if engine ranks did not stage in time: they may have waited for those ranks."""
        silent = self._rank_server.silent()
        if not (silent and failed.step == "stage" and isinstance(failed.cause, DeadlineExceeded)):
            return failed
        who = ", ".join(
            f"trainer rank {rank} (silent for {since_s:.0f} s)" for rank, since_s in silent.items()
        )
        return RoundFailed(
            DeadlineExceeded(f"{who} to hand its memory over", failed.waited_s),
            replica=failed.replica,
            rank=next(iter(silent)),
            step=failed.step,
            waited_s=failed.waited_s,
            serving=failed.serving,
            next_mode=failed.next_mode,
            answers=failed.answers,
        )

    def _failed(self, fault: Fault, deadline: Deadline) -> RoundFailed:
        return RoundFailed(
            fault.to_error(),
            replica=TRAINER,
            rank=fault.rank,
            step=fault.step,
            waited_s=fault.waited_s or deadline.waited_s(),
            serving=self._serving,
        )
