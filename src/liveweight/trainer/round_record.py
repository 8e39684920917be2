"""The publisher's record of one round: the offer, and the progress of each replica."""

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
    """One round. `invalidated`: why its live offer must not be committed; it is set before `staged`."""

    version: Version
    made: MadeOffer
    replicas: list[ReplicaProgress]
    deadline: Deadline
    began_s: float
    coordinator: RoundCoordinator | None = None
    outcome: Future[Report] = field(default_factory=Future)
    staged: threading.Event = field(default_factory=threading.Event)
    invalidated: str | None = None


def report_of(
    current: PublisherRound, coordinator: RoundCoordinator, *, verify: bool, size_bytes: int, missed: int
) -> Report:
    """The report of a round that reached its quorum; `missed` rounds failed before it."""
    unchanged = all(progress.unchanged for progress in current.replicas)
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
        replicas=tuple(progress.report(verified=verify) for progress in current.replicas),
        staleness=missed,
        failed_modes=current.made.failed_modes,
    )
