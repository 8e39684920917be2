"""Between a rank and the ring of a source: subscriptions, buckets that are filled, segments that are free again."""

from __future__ import annotations

from liveweight.spec.layout import Layout
from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import RingGeometry

__all__ = [
    "BucketFilled",
    "RepackBucket",
    "RingGeometry",
    "SegmentFree",
    "Subscribe",
    "Subscribed",
    "Unsubscribe",
]


class Subscribe(Body, frozen=True):
    """Pack these parcels for me, bucket by bucket. -> Subscribed.

    `layout` and `generation` are the offer's. `stream` is the fingerprint of the parcels; `parcels` are sent once per
    source. `number` is the rank's own, and everything that follows carries it; what the rank had subscribed to before is over.
    """

    number: int
    layout: str
    generation: int
    stream: str
    parcels: Layout | None = None


class Subscribed(Body, frozen=True):
    """Buckets follow as BucketFilled, if the offer still holds. `known` False: the parcels have to be sent."""

    known: bool
    stands: bool


class BucketFilled(Body, frozen=True):
    """Notification to a rank: that bucket lies in that segment, so many bytes. The segment is the rank's now.

    `sum` is the checksum of the digests of its parcels, in their order.
    """

    number: int
    bucket: int
    segment: int
    size_bytes: int
    sum: int


class SegmentFree(Body, frozen=True):
    """Notification to a source: the rank has copied the bucket out; the segment is the source's again."""

    number: int
    bucket: int


class RepackBucket(Body, frozen=True):
    """Notification to a source: the bucket is not what was packed. It is packed again, into the segment that the rank has."""

    number: int
    bucket: int


class Unsubscribe(Body, frozen=True):
    """Notification to a source: the rank wants no more, and all its segments are free. `staged`: it has everything."""

    number: int
    staged: bool
