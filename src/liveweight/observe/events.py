"""The closed set of events: frozen values that carry facts and no text.

Owns the set of events. The readers (log, metrics, reports) own the words.
An event is emitted once, after the fact, where it happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, TypedDict

OfferKind: TypeAlias = Literal["live", "frozen", "ring"]


class RoundOutcome(StrEnum):
    """How a round ended."""

    COMMITTED = "committed"
    UNCHANGED = "unchanged"  # the version was installed already: a success without work
    UNDONE = "undone"
    REFUSED = "refused"
    ABORTED = "aborted"
    TORN = "torn"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent(Event):
    """A step of a round. `round` is its id as text; of a refused open, as much of it as is known."""

    replica: str
    round: str
    version: str


class RoundFacts(TypedDict):
    """The fields of every event of a round, for code that emits several."""

    replica: str
    round: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrReplicaEvent(RoundEvent):
    """A step that ranks take, and then their replica. `rank` is None where the whole replica is meant."""

    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened(RoundEvent):
    """The manifests agree and the replica is held by this round; the undo of the round before is gone.

    `kept` names the optional groups of tensors that the offer leaves out, which stay as they are.
    """

    serving: str | None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingBegan(RoundEvent):
    """A rank is attached to the source and is about to read."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverwritingBegan(RoundEvent):
    """A rank in place has overwritten the first of its live weights: from here on only all of them are whole."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStaged(RoundEvent):
    """A rank has read all regions it owns into its shadow; in place, over its live weights."""

    rank: int
    size_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVerified(RankOrReplicaEvent):
    """What lies in the shadow has the manifest's digests."""

    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteCast(RankOrReplicaEvent):
    """A vote was cast. `objection` is None for a yes, which holds for `lease_s`."""

    lease_s: float
    objection: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommitted(RankOrReplicaEvent):
    """The new weights are live. `stall_s` is how long decoding stood still for it."""

    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundGivenUp(RankOrReplicaEvent):
    """The round was given up before its commit and its shadow dropped. `rank` is who failed, if one did."""

    step: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundUndone(RoundEvent):
    """The weights of before are live again. `version` is the one that was taken back."""

    serving: str
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(RoundEvent):
    """A replica was ready and received no decision within its vote lease; it aborts."""

    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded(RoundEvent):
    """The last event of every round. `serving` is None where none of ours serves, or is known to."""

    outcome: RoundOutcome
    took_s: float
    verified: bool
    serving: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditBegan(Event):
    """A rank reads its live weights, to digest them."""

    replica: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited(Event):
    """What a replica holds was compared with what it should be; `match` None: there was nothing to compare with.

    `differing` names the first tensors that differ, `count` is how many there are in all; `took_s` is that of the slowest rank.
    """

    replica: str
    serving: str | None
    match: bool | None
    differing: tuple[str, ...]
    count: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferMade(Event):
    """A source offers a version."""

    version: str
    kind: OfferKind
    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFrozen(Event):
    """A trainer rank's share is copied into its arena; its parameters may change now."""

    version: str
    rank: int
    size_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOfferImpossible(Event):
    """The parameters cannot be read, or for a ring packed, where they lie; the source freezes instead. Emitted when the reason changes,
    with the first version that it holds for."""

    version: str
    reason: str
    kind: OfferKind = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFailed(Event):
    """A transfer mode failed, for that reason, and the next attempt uses the one that follows."""

    mode: str
    code: str
    reason: str
    following: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDamaged(Event):
    """A rank found that a bucket, which begins with that tensor, was not what had been packed; it was packed again."""

    bucket: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersRevoked(Event):
    """A source went on to its next version while these still read the one before; their rounds fail."""

    readers: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSaved(Event):
    """A version that a replica serves is complete in files."""

    replica: str
    version: str
    path: str
    size_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAbandoned(Event):
    """Other weights came before the version was written; nothing of it is left."""

    replica: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFailed(Event):
    """The version could not be written; it goes on being served."""

    replica: str
    version: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBegan(Event):
    """A rank was lost, or its replacement was: the ranks are started again."""

    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Event):
    """A replica serves again; `behind` is the version that it had, where it came back with another."""

    replica: str
    version: str
    origin: str
    behind: str | None
    notes: tuple[str, ...]
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent(Event):
    """A publisher sent a notice about a version outside a round."""

    replica: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionConfirmed(FleetEvent):
    """A publisher found its version installed already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedBehind(FleetEvent):
    """Other replicas serve this version and this one does not: it is to take no requests until a round has brought it one."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused(Event):
    """A listener turned a peer away, or could not read a message of it. `code` is the error's."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsChosen(Event):
    """Which kernels digest and copy. `reason` says why not the native ones, or is None."""

    name: str
    reason: str | None = None


AnyStep: TypeAlias = (
    RoundOpened
    | StagingBegan
    | OverwritingBegan
    | RankStaged
    | RankVerified
    | VoteCast
    | RoundCommitted
    | RoundGivenUp
    | RoundUndone
    | LeaseExpired
    | RoundEnded
)
"""Every event of a round."""

AnyEvent: TypeAlias = (
    AnyStep
    | AuditBegan
    | Audited
    | OfferMade
    | SourceFrozen
    | LiveOfferImpossible
    | ModeFailed
    | BucketDamaged
    | ReadersRevoked
    | SnapshotSaved
    | SnapshotAbandoned
    | SnapshotFailed
    | RecoveryBegan
    | Recovered
    | VersionConfirmed
    | MarkedBehind
    | PeerRefused
    | KernelsChosen
)
"""Every event there is. Readers match it exhaustively, so a new event asks each of them for an answer."""
