"""The trainer's rounds, one at a time. `begin` and `finish` are separate, so that training goes on meanwhile; rounds become records.

Owns the publisher for the length of the `with`. When to repeat a failed round is decided in lab/demo/publishing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from liveweight.errors import OutcomeUnknown, RoundFailed
from liveweight.lab.demo.records import DemoRound, Stage, StepReached
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.watched_replica import WatchedReplica
from liveweight.rounds.report import Report
from liveweight.trainer.publisher import RoundPublisher

MakePublisher: TypeAlias = Callable[[object, Sequence[WatchedReplica]], RoundPublisher]
"""(the trainer's module, the fleet) -> `lw.Publisher`."""


class TrainerRounds:
    """For the trainer's thread."""

    def __init__(
        self, publisher: RoundPublisher, replicas: Sequence[WatchedReplica], *, stop: Stop, since_s: float
    ) -> None:
        self.replicas = tuple(replicas)
        self._publisher, self._stop, self._since_s = publisher, stop, since_s
        self._version, self._began_s = 0, 0.0
        self._open = False

    def begin(self, version: int) -> None:
        """Offer the current weights as that version. They may change once it returns."""
        self._version, self._began_s = version, time.monotonic()
        self._publisher.offer(version)
        self._open = True

    def finish(self) -> list[DemoRound]:
        """Wait for the round that was begun, and return it; empty if none was. RunStopped if the demo is to end."""
        if not self._open:
            return []
        self._open = False
        try:
            report, problem = self._publisher.wait(), None
        except (RoundFailed, OutcomeUnknown) as error:
            report, problem = None, str(error)
        self._stop.check()
        return [self._round(report, problem)]

    def publish(self, version: int) -> DemoRound:
        """Begin a round, and wait for its end."""
        self.begin(version)
        return self.finish()[0]

    @contextmanager
    def hurried(self, timeout_s: float) -> Iterator[None]:
        """Rounds that begin in this block have only this much time."""
        before = self._publisher.settings
        self._publisher.settings = replace(before, timeout_s=timeout_s)
        try:
            yield
        finally:
            self._publisher.settings = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.close()

    def _round(self, report: Report | None, problem: str | None) -> DemoRound:
        total_s = time.monotonic() - self._began_s
        return DemoRound(
            began_s=self._began_s - self._since_s,
            version=self._version,
            total_ms=(total_s if report is None else report.total_s) * 1e3,
            freeze_ms=0.0 if report is None else (report.freeze_s + report.digest_s) * 1e3,
            size_bytes=0 if report is None else report.size_bytes,
            replicas=tuple(replica.part() for replica in self.replicas),
            problem=problem,
        )


class RoundListener(Protocol):
    """Follows which versions replicas read and serve. Called by the publisher's threads."""

    def offers(self, version: int) -> None:
        """A replica has begun to read this version."""

    def serves(self, version: int) -> None:
        """All replicas serve this version, or a later one."""


class SilentListener:
    """Ignores all versions."""

    def offers(self, version: int) -> None:
        """See RoundListener."""

    def serves(self, version: int) -> None:
        """See RoundListener."""


class RoundProgress:
    """Emits a record for every stage that a replica reaches, and notices when all replicas serve a version. For any thread."""

    def __init__(
        self, count: int, *, since_s: float, emit: Callable[[StepReached], None], listener: RoundListener
    ) -> None:
        self._latest = [-1] * count
        self._since_s, self._emit, self._listener = since_s, emit, listener

    def on_stage(self, version: int, replica: int, stage: Stage, took_ms: float) -> None:
        """A replica has reached this stage."""
        at_s = time.monotonic() - self._since_s
        self._emit(StepReached(at_s=at_s, version=version, replica=replica, stage=stage, took_ms=took_ms))
        if stage == "open":
            self._listener.offers(version)
        elif stage == "commit":
            self._latest[replica] = version
            self._listener.serves(min(self._latest))
