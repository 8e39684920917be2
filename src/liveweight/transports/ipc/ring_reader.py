"""The rank half of a ring: subscribes to what the rank owns, copies every bucket out, checks it and gives its segment back.

Owns the link to a source's ring: its channel, which the copy threads use under a lock, and the ring's mapping. A bucket whose checksum
differs is requested again; the error names it if it still differs.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from liveweight.devices.kernels import BoundCopy, BoundDigest, BoundFreeze
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, ChecksumMismatch, DeadlineExceeded, MessageInvalid, OfferChanged
from liveweight.plan.unpacking import Unpacking
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.ipc.arena import MappedArena, combined
from liveweight.transports.ipc.ring_arena import sum_of
from liveweight.transports.port import GoOn, check_generation, patient
from liveweight.wire.channel import Channel
from liveweight.wire.messages import Message, Refusal
from liveweight.wire.messages.ring import (
    BucketFilled,
    RepackBucket,
    SegmentFree,
    Subscribe,
    Subscribed,
    Unsubscribe,
)
from liveweight.wire.messages.values import Offer

POLL_S = 0.05
"""How long a thread waits for a bucket before it checks whether to go on and whether the offer stands."""
TRIES = 3
"""How often a bucket is read before it is given up."""
_SEND_S = 5.0


class RingLink:
    """A rank's connection to one ring, and its segments. Any thread of the rank may use it; the staging thread closes it."""

    def __init__(self, channel: Channel[Message], arena: MappedArena, segments: Sequence[Memory]) -> None:
        self.arena, self.segments = arena, tuple(segments)
        self._channel, self._waker = channel, channel.waker()
        self._lock = threading.Lock()
        self._outbox: deque[Message] = deque()
        self._numbers = itertools.count(1)
        self._known_streams: set[str] = set()

    def subscribe(self, offer: Offer, stream: Layout, deadline: Deadline) -> int | None:
        """The number of a new subscription, which ends the one before; None where the offer does not stand any more."""
        number, name = next(self._numbers), stream.fingerprint
        known = name in self._known_streams
        while True:
            body = Subscribe(
                number=number,
                layout=offer.layout,
                generation=offer.generation,
                stream=name,
                parcels=None if known else stream,
            )
            with self._lock:
                reply = self._channel.request(body, deadline, f"{offer.source} to pack for this rank")
            match reply:
                case Subscribed(known=True, stands=stands):
                    self._known_streams.add(name)
                    return number if stands else None
                case Subscribed() if known:
                    known = False  # the source has dropped it
                case Refusal(fault=fault):
                    raise fault.to_error()
                case other:
                    raise MessageInvalid(f"{offer.source} answered with {type(other).__name__}")

    def post(self, body: Message) -> None:
        """Send a message to the source: now, or by the thread that is listening."""
        self._outbox.append(body)
        self._flush()
        if self._outbox:
            self._waker.wake()

    def listen(self, on_message: Callable[[Message], None], within_s: float) -> bool:
        """Receive messages for up to `within_s`. Returns False if another thread already listens."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with suppress(DeadlineExceeded):
                body = self._channel.receive_or_wake(Deadline.after(within_s), "a bucket")
                while body is not None:
                    on_message(body)
                    body = self._channel.receive_now()
        finally:
            self._lock.release()
            self._flush()
        return True

    def close(self) -> None:
        """Close the connection. Readings that are under way fail with ChannelClosed."""
        with self._lock:
            self._channel.close()

    def _flush(self) -> None:
        while self._outbox and self._lock.acquire(blocking=False):
            try:
                while self._outbox:
                    self._channel.send(self._outbox.popleft(), Deadline.after(_SEND_S))
            finally:
                self._lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundUnpacking:
    """The tables of an unpacking plan, from one segment to one shadow."""

    moves: BoundFreeze
    reads: BoundDigest
    copies: BoundCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class RingBinding:
    """A rank's copies out of a ring, bound to each segment at its first use, to shadows at these addresses. `rows` are they as copies
    alone, bucket by bucket, which `starts` begins."""

    stream: Layout
    rows: Table
    starts: Table
    unpacking: Unpacking
    bind: Callable[[int], BoundUnpacking]
    bound: dict[int, BoundUnpacking] = field(default_factory=dict)

    def unpack(self, segment: int, bucket: int) -> Lanes:
        """Copy a bucket out of a segment; the digests of its parcels."""
        bound = self.bound.get(segment)
        if bound is None:
            bound = self.bound.setdefault(segment, self.bind(segment))
        lanes = bound.moves.run(*self.unpacking.moves.range_of(bucket))
        lanes += bound.reads.run(*self.unpacking.reads.range_of(bucket))
        bound.copies.run(*self.unpacking.copies.range_of(bucket))
        return lanes[: self.unpacking.counts[bucket]]


class RingReading:
    """A rank's part of one ring offer. Holds the mappings and the shadow while it lives."""

    def __init__(
        self,
        offer: Offer,
        binding: RingBinding,
        link: RingLink,
        pages: Sequence[MappedArena],
        shadow: Sequence[Memory],
        number: int | None,
    ) -> None:
        self.rows, self.overlaps = binding.rows, False
        self._offer, self._binding, self._link = offer, binding, link
        self._pages, self._shadow = tuple(pages), tuple(shadow)
        self._number, self._stands = number, number is not None
        self._out: list[bool | None] = [False] * len(binding.starts)
        """Of each bucket: whether it is copied out; None while a thread does it."""
        self._changed = threading.Condition()
        self._filled: dict[int, BucketFilled] = {}
        self._tries: dict[int, int] = {}
        self._failure: Refusal | None = None

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """Copy rows [first, last) out of their buckets, and what else these hold, waiting for each; one that is done is given back."""
        if first < last:
            begin, end = np.searchsorted(self._binding.starts, [first, last - 1], side="right").tolist()
            for at in range(begin - 1, end):
                if not self._have(at, go_on):
                    return

    def check(self) -> None:
        """Raise OfferChanged if the source has revoked the offer: what was read may be a mixture."""
        check_generation(self._offer, combined(page.generation for page in self._pages))
        if not self._stands:
            raise OfferChanged(f"{self._offer.source} ended the offer of generation {self._offer.generation}")

    def end(self) -> None:
        """Give back what this rank still holds, and say whether it has everything."""
        number, self._number = self._number, None
        if number is not None:
            with suppress(ChannelClosed, DeadlineExceeded):
                self._link.post(Unsubscribe(number=number, staged=all(self._out)))

    def _have(self, at: int, go_on: GoOn) -> bool:
        """Wait until the bucket is copied out, by this thread or by another; False if `go_on` ended the wait."""
        while True:
            with self._changed:
                state = self._out[at]
                if state is False:
                    self._out[at] = None
            if state:
                return True
            if state is False:
                return self._copy_out(at, go_on)
            if not go_on():
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._out[at] is not None, POLL_S)

    def _copy_out(self, at: int, go_on: GoOn) -> bool:
        bucket, done = int(self.rows[self._binding.starts[at], 0]), False
        try:
            while not done and (filled := self._arrived(bucket, go_on)) is not None:
                done = self._copied(filled)
                if not done:
                    self._request_again(filled)
        finally:
            with self._changed:
                self._out[at] = done
                self._changed.notify_all()
        if done and self._number is not None:
            self._link.post(SegmentFree(number=self._number, bucket=bucket))
        return done

    def _arrived(self, bucket: int, go_on: GoOn) -> BucketFilled | None:
        """The segment that holds the bucket; None if `go_on` ended the wait."""
        while True:
            with self._changed:
                filled = self._filled.pop(bucket, None)
            if filled is not None:
                return filled
            if self._failure is not None:
                raise self._failure.fault.to_error()
            self.check()
            if not go_on():
                return None
            if not self._link.listen(self._on_message, POLL_S):
                with self._changed:
                    self._changed.wait_for(lambda: bucket in self._filled, POLL_S)

    def _on_message(self, body: Message) -> None:
        with self._changed:
            match body:
                case BucketFilled(number=number) if number == self._number:
                    self._filled[body.bucket] = body
                case Refusal():
                    self._failure = body
                case _:
                    return  # of a subscription that is over
            self._changed.notify_all()

    def _copied(self, filled: BucketFilled) -> bool:
        """Copy a bucket out; whether what was copied is what was packed.

        Where it was not, the shadow has what the next attempt overwrites.
        """
        size, segment = self._binding.stream.memories_bytes[filled.bucket], filled.segment
        if not 0 <= segment < len(self._link.segments) or filled.size_bytes != size:
            raise MessageInvalid(
                f"{self._offer.source} announced {filled.size_bytes} bytes in segment {segment}"
            )
        return sum_of(self._binding.unpack(segment, filled.bucket)) == filled.sum

    def _request_again(self, filled: BucketFilled) -> None:
        """Ask for a bucket again, and give it up by name where it differs still."""
        self.check()  # overwritten because it was revoked, or damaged
        bucket = filled.bucket
        tries = self._tries[bucket] = self._tries.get(bucket, 1) + 1
        if tries > TRIES:
            parcels = self._binding.stream.placements
            tensor = next(parcel.name for parcel in parcels if parcel.memory == bucket)
            raise ChecksumMismatch(
                f"bucket {bucket} of {self._offer.source}, which begins with {tensor}, was damaged {TRIES} times"
            )
        self._link.post(RepackBucket(number=filled.number, bucket=bucket))
