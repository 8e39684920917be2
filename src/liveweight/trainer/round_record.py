"""The record of one round at its publisher: what was offered to whom, and how far it has come."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from liveweight.rounds.coordinator import RoundCoordinator
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.rounds.report import Report
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.trainer.offers.single_source import MadeOffer


@dataclass(slots=True)
class PublisherRound:
    """`invalidated`: why its live offer must not be committed. Known before `staged` is set."""

    version: Version
    made: MadeOffer
    parts: list[ReplicaProgress]
    deadline: Deadline
    began_s: float
    coordinator: RoundCoordinator | None = None
    outcome: Future[Report] = field(default_factory=Future)
    staged: threading.Event = field(default_factory=threading.Event)
    invalidated: str | None = None


def report_of(
    current: PublisherRound, coordinator: RoundCoordinator, *, verify: bool, size_bytes: int, missed: int
) -> Report:
    """What is said of a round that reached its quorum; `missed` failed before it."""
    unchanged = all(progress.unchanged for progress in current.parts)
    return Report(
        version=current.version,
        mode=current.made.offer.mode,
        offer=current.made.offer.kind,
        verified=verify and not unchanged,
        unchanged=unchanged,
        size_bytes=size_bytes,
        total_s=time.monotonic() - current.began_s,
        freeze_s=current.made.freeze_s,
        digest_s=current.made.digest_s,
        vote_s=coordinator.vote_s,
        commit_s=coordinator.commit_s,
        replicas=tuple(progress.report(verified=verify) for progress in current.parts),
        staleness=missed,
        failed_modes=current.made.failed_modes,
    )
