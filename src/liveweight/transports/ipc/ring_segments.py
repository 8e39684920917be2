"""The book of a ring: which rank has which segment, and what is packed next. Pure: no bytes, no sockets, no clock.

A segment is the source's, or a rank's from when its bucket is packed until that rank gives it back, leaves, or its offer ends. Who
holds the fewest is packed for first, so a rank that lags keeps no more of the ring than the others do; and nobody may take all of it,
so that one who comes late, or goes on, always finds some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

AHEAD = 3
"""Segments that a rank holds at most: one that it reads, one that waits for it, one that is packed. More would only lie there."""


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

    destination: RingSubscription
    bucket: int
    segment: int
    again: bool


class RingSegments:
    """Owned by the ring's thread, or by who holds its lock."""

    def __init__(self, segments: int) -> None:
        self._segments = segments
        self._free = deque(range(segments))
        self._destinations: dict[bytes, RingSubscription] = {}

    @property
    def free(self) -> int:
        """How many segments are the source's."""
        return len(self._free)

    def join(self, destination: RingSubscription) -> None:
        """One more rank; what it had before is over."""
        self.leave(destination.peer)
        self._destinations[destination.peer] = destination

    def find(self, peer: bytes, number: int) -> RingSubscription | None:
        """That subscription, if it still stands."""
        found = self._destinations.get(peer)
        return found if found is not None and found.number == number else None

    def leave(self, peer: bytes) -> None:
        """A rank wants no more, or is gone: its segments are the source's again."""
        left = self._destinations.pop(peer, None)
        if left is not None:
            self._free.extend(left.held.values())
            left.held.clear()
            left.next = left.buckets

    def drop(self, layout: str) -> None:
        """The offer of that layout ends, for all who read it."""
        for peer in [d.peer for d in self._destinations.values() if d.layout == layout]:
            self.leave(peer)

    def freed(self, destination: RingSubscription, bucket: int) -> None:
        """A rank gives a segment back. Said twice, it has no effect."""
        segment = destination.held.pop(bucket, None)
        if segment is not None:
            self._free.append(segment)

    def again(self, destination: RingSubscription, bucket: int) -> None:
        """A bucket has to be packed again, where it lies."""
        if bucket in destination.held and bucket not in destination.again:
            destination.again.append(bucket)

    def take(self) -> PackJob | None:
        """What to pack next; None: nothing, until a rank gives a segment back or subscribes."""
        for destination in self._destinations.values():
            while destination.again:
                bucket = destination.again.popleft()
                if bucket in destination.held:
                    segment = destination.held[bucket]
                    return PackJob(destination=destination, bucket=bucket, segment=segment, again=True)
        ready = list(self._ready()) if self._free else []
        if not ready:
            return None
        chosen = min(ready, key=lambda destination: len(destination.held))
        bucket, segment = chosen.next, self._free.pop()
        chosen.next += 1
        chosen.held[bucket] = segment
        return PackJob(destination=chosen, bucket=bucket, segment=segment, again=False)

    def _ready(self) -> Iterable[RingSubscription]:
        busy = sum(destination.busy for destination in self._destinations.values())
        most = max(1, min(AHEAD, -(-self._segments // (busy + 1))))
        return (d for d in self._destinations.values() if d.next < d.buckets and len(d.held) < most)
