"""The segments of a ring: which rank has which segment, and which bucket is packed next. Pure: no bytes, no sockets, no clock.

A segment is free, or a rank has it from when its bucket is packed until the rank frees it, unsubscribes, or its offer ends. The rank with
the fewest segments is packed for first, so a slow rank has no more of the ring than the others; and no rank may have all of it, so that a
rank that subscribes late always gets some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

AHEAD = 3
"""Segments that a rank holds at most: one that it reads, one that waits for it, one that is packed. More would only wait."""


@dataclass(slots=True, kw_only=True)
class RingSubscription:
    """One rank's subscription. `held` are its segments, by bucket."""

    peer: bytes
    number: int
    layout: str
    stream: str
    buckets: int
    next: int = 0
    held: dict[int, int] = field(default_factory=dict)
    again: deque[int] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether anything is still to be packed for it, or to be given back by it."""
        return self.next < self.buckets or bool(self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackJob:
    """Pack this bucket for this rank into this segment."""

    subscription: RingSubscription
    bucket: int
    segment: int
    again: bool


class RingSegments:
    """Used by one thread at a time, under the ring's lock."""

    def __init__(self, segments: int) -> None:
        self._segments = segments
        self._free = deque(range(segments))
        self._subscriptions: dict[bytes, RingSubscription] = {}

    @property
    def free(self) -> int:
        """How many segments are free."""
        return len(self._free)

    def subscribe(self, subscription: RingSubscription) -> None:
        """Add a rank's subscription; an earlier one of the same rank ends."""
        self.unsubscribe(subscription.peer)
        self._subscriptions[subscription.peer] = subscription

    def find(self, peer: bytes, number: int) -> RingSubscription | None:
        """That subscription, if it still stands."""
        found = self._subscriptions.get(peer)
        return found if found is not None and found.number == number else None

    def unsubscribe(self, peer: bytes) -> None:
        """End a rank's subscription, because it asked for that or is gone. Its segments are free again."""
        left = self._subscriptions.pop(peer, None)
        if left is not None:
            self._free.extend(left.held.values())
            left.held.clear()
            left.next = left.buckets

    def end_offer(self, layout: str) -> None:
        """End all subscriptions to the offer of that layout."""
        for peer in [d.peer for d in self._subscriptions.values() if d.layout == layout]:
            self.unsubscribe(peer)

    def freed(self, subscription: RingSubscription, bucket: int) -> None:
        """A rank frees a segment. A second call has no effect."""
        segment = subscription.held.pop(bucket, None)
        if segment is not None:
            self._free.append(segment)

    def repack(self, subscription: RingSubscription, bucket: int) -> None:
        """A bucket has to be packed again, where it lies."""
        if bucket in subscription.held and bucket not in subscription.again:
            subscription.again.append(bucket)

    def next_job(self) -> PackJob | None:
        """What to pack next; None: nothing, until a rank gives a segment back or subscribes."""
        for subscription in self._subscriptions.values():
            while subscription.again:
                bucket = subscription.again.popleft()
                if bucket in subscription.held:
                    segment = subscription.held[bucket]
                    return PackJob(subscription=subscription, bucket=bucket, segment=segment, again=True)
        ready = list(self._ready()) if self._free else []
        if not ready:
            return None
        chosen = min(ready, key=lambda subscription: len(subscription.held))
        bucket, segment = chosen.next, self._free.pop()
        chosen.next += 1
        chosen.held[bucket] = segment
        return PackJob(subscription=chosen, bucket=bucket, segment=segment, again=False)

    def _ready(self) -> Iterable[RingSubscription]:
        busy = sum(subscription.busy for subscription in self._subscriptions.values())
        most = max(1, min(AHEAD, -(-self._segments // (busy + 1))))
        return (d for d in self._subscriptions.values() if d.next < d.buckets and len(d.held) < most)
