"""The report of a round: a frozen value, and flat numbers for a logger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liveweight.observe.events import OfferKind
from liveweight.spec.manifest import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One replica's line: the version it serves now, whether it committed, how long it took. `reason` says why it did not.

    `kept` names the optional groups, such as `draft`, that the offer left out: of them the replica keeps what it had. `restarted`: it was
    restarted since its last answer to the publisher. `read` is what was compared with the trainer's weights, as far as is known: all that
    the replica computes with (`installed`), or of some tensors only the copy that they were installed from (`staged`).
    """

    name: str
    serving: Version | None
    committed: bool
    stage_s: float
    verify_s: float
    stall_s: float
    staged_bytes: int
    reason: str | None = None
    kept: tuple[str, ...] = ()
    restarted: bool = False
    read: Literal["installed", "staged"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMode:
    """A transfer mode that is not used any more because it failed: with that code, for that reason."""

    mode: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A round that reached its quorum. `unchanged`: the version was installed already, and nothing was done.

    `verified` is True only if what the ranks hold was digested and compared with the source's digests. `mode` is the transfer mode that was
    used, `failed_modes` those of the publisher's that have failed and were not tried since.
    """

    version: Version
    mode: str
    offer: OfferKind
    verified: bool
    unchanged: bool
    size_bytes: int
    total_s: float
    freeze_s: float
    digest_s: float
    vote_s: float
    commit_s: float
    replicas: tuple[ReplicaReport, ...]
    staleness: int
    failed_modes: tuple[FailedMode, ...] = ()

    @property
    def behind(self) -> tuple[str, ...]:
        """The replicas that did not commit; they serve what they served before, and catch up in the next round."""
        return tuple(replica.name for replica in self.replicas if not replica.committed)

    def metrics(self) -> dict[str, float]:
        """Flat numbers, of the slowest replica where replicas differ."""
        done = [replica for replica in self.replicas if replica.committed]
        return {
            "weight_sync/total_s": self.total_s,
            "weight_sync/freeze_s": self.freeze_s + self.digest_s,
            "weight_sync/stage_s": max((replica.stage_s for replica in done), default=0.0),
            "weight_sync/verify_s": max((replica.verify_s for replica in done), default=0.0),
            "weight_sync/vote_s": self.vote_s,
            "weight_sync/stall_s": max((replica.stall_s for replica in done), default=0.0),
            "weight_sync/bytes": float(sum(replica.staged_bytes for replica in done)),
            "weight_sync/staleness": float(self.staleness),
            "weight_sync/version": float(self.version.number or 0),
        }
