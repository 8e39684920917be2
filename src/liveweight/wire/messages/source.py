"""To a source: from the ranks that read its memory, and from engines that ask for what it offers."""

from __future__ import annotations

from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import KeptSet, Manifest, Version
from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Offer, RingGeometry


class Attach(Body, frozen=True):
    """Where does the memory of this layout lie, for offers of this kind? -> Attached."""

    layout: str
    kind: OfferKind


class Attached(Body, frozen=True):
    """A source's layout, and per memory the token under which its descriptor is handed out (or the transport's own bytes).

    With a ring, the first is the ring's, and those of the layout's memories are of no bytes: they carry the generation.
    """

    layout: Layout
    memories: tuple[bytes, ...]
    descriptors: str
    ring: RingGeometry | None = None


class GetShardLayout(Body, frozen=True):
    """Which parts of which tensors does the shard of this layout hold? -> ShardLayout."""

    layout: str


class ShardLayout(Body, frozen=True):
    """The layout of that shard."""

    layout: Layout


class AcquireReadLease(Body, frozen=True):
    """Lease a version to me while my ranks read it: the version of that label, compared as text; None: the newest.

    -> ReadLeaseGranted or ReadLeaseRefused. The read lease ends with ReleaseReadLease, with the connection, or after
    `lease_s`. While the source changes its offer, the answer waits, for at most `wait_s`.
    """

    requester: str
    version: str | None
    lease_s: float
    wait_s: float


class ReadLeaseGranted(Body, frozen=True):
    """The version is leased: what a round of it opens with. `lease` is the number to release it by."""

    lease: int
    version: Version
    structure: str
    manifest: Manifest
    digests: bytes | None
    offer: Offer
    kept: KeptSet | None = None


class ReadLeaseRefused(Body, frozen=True):
    """The source does not offer that version, but these. `changing`: it still makes its next offer, and the wait is over."""

    offered: tuple[Version, ...]
    changing: bool = False


class MemoryWanted(Body, frozen=True):
    """Notification to a requester: the source needs its memory for the next version, and waits so long at most."""

    lease: int
    within_s: float


class ReleaseReadLease(Body, frozen=True):
    """My ranks read no more. `read`: they have read everything. -> ReadLeaseReleased."""

    lease: int
    read: bool


class ReadLeaseReleased(Body, frozen=True):
    """The read lease is over. `revoked`: it had ended before; what was read since is worth nothing."""

    revoked: bool
