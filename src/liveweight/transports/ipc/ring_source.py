"""The source half of a ring: one memory in segments, packed for one rank after the other, handed over and given back.

Owns the ring's memory, its socket, and the one thread that packs buckets and answers ranks. The owner of the packing source must not change
it before `end` has returned; the owner of the arenas raises their generation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    MessageInvalid,
    Unavailable,
)
from liveweight.plan.parcel_covers import Mask, covers
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.ipc.ring_arena import segments_of
from liveweight.transports.ipc.ring_packing import BucketPacking, digests_of
from liveweight.transports.ipc.ring_segments import PackJob, RingSegments, RingSubscription
from liveweight.transports.packing_source import DamagedBucket, PackingSource, RingCounts, RingSettings
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Message, Refusal
from liveweight.wire.messages.body import refuse_call
from liveweight.wire.messages.ring import (
    BucketFilled,
    RepackBucket,
    SegmentFree,
    Subscribe,
    Subscribed,
    Unsubscribe,
)
from liveweight.wire.messages.values import RingGeometry, fault_of

_IDLE_S = 3600.0
_STREAMS_KEPT = 64


@dataclass(slots=True, kw_only=True)
class _RingOffer:
    """An offer that stands: what it is packed from, and what was packed of it."""

    packing_source: PackingSource
    generation: int
    packings: dict[str, BucketPacking] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    buckets: int = 0
    size_bytes: int = 0
    staged: int = 0
    damaged: list[DamagedBucket] = field(default_factory=list)


class Ring:
    """One publisher's ring. Its threads call `offer`, `end`, `digests` and `counts`; the ring's own thread serves ranks."""

    def __init__(
        self, address: str, secret: Secret, settings: RingSettings, limits: WireLimits | None = None
    ) -> None:
        self.settings, self._limits = settings, limits or WireLimits()
        size = settings.segment_bytes
        self.arena = SharedArena(settings.segments * size)
        self._segments = segments_of(self.arena.memory, settings.segments, size)
        self._changed = threading.Condition()
        self._assignments = RingSegments(settings.segments)
        self._offers: dict[str, _RingOffer] = {}
        self._streams: dict[str, Layout] = {}
        self._masks: dict[tuple[str, ...], list[Mask]] = {}
        self._packing: str | None = None
        self._closing = False
        try:
            listener = Listener(address, secret, Codec[Message](Message), self._limits, refuse=refuse_call)
        except BaseException:
            self.arena.close()
            raise
        self.terms = RingGeometry(address=listener.address, segments=settings.segments, segment_bytes=size)
        self._waker = listener.waker()
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="liveweight-ring", daemon=True
        )
        self._thread.start()

    def offer(self, packing_source: PackingSource, generation: int) -> None:
        """Let ranks subscribe to that packing source, under that generation. Subscriptions to an earlier offer of the
        same layout end."""
        layout = packing_source.offered.fingerprint
        self.end(layout)
        with self._changed:
            before = self._offers.get(layout)
            kept = before.packings if before is not None and before.packing_source is packing_source else {}
            for packing in kept.values():
                packing.begin()
            self._offers[layout] = _RingOffer(
                packing_source=packing_source, generation=generation, packings=kept
            )

    def end(self, layout: str) -> None:
        """Pack no more of that offer: when this returns, nothing of its packing source is read, and all its segments are free.

        It waits without a limit of its own for the one bucket that is being packed: the packing source's owner is about to change what
        is read.
        """
        with self._changed:
            self._assignments.end_offer(layout)
            current = self._offers.get(layout)
            if current is not None:
                current.generation = 0
            self._changed.wait_for(lambda: self._packing != layout)

    def withdraw(self, layout: str) -> None:
        """Forget that offer, and release its packing source."""
        self.end(layout)
        with self._changed:
            self._offers.pop(layout, None)

    def digests(self, layout: str) -> Lanes:
        """The digests of what that offer holds, once ranks have staged it. While it stands."""
        with self._changed:
            current = self._offers[layout]
            packings = [current.packings[stream] for stream in current.order]
            masks = self._covers(current)
        return digests_of(current.packing_source, packings, masks, self.settings.segment_bytes)

    def counts(self, layout: str) -> RingCounts:
        """What was done for that offer so far."""
        with self._changed:
            current = self._offers[layout]
            return RingCounts(
                buckets=current.buckets,
                size_bytes=current.size_bytes,
                staged=current.staged,
                damaged=tuple(current.damaged),
            )

    def close(self) -> None:
        """End the thread, remove the socket, give the memory back. Ranks that map it keep it until they unmap it. May be called
        twice."""
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._offers.clear()
        self.arena.close()

    def _covers(self, current: _RingOffer) -> list[Mask]:
        key = tuple(current.order)
        if key not in self._masks:
            self._masks.clear()
            self._masks[key] = covers([current.packings[stream].stream for stream in key])
        return self._masks[key]

    # The thread.

    def _serve(self, listener: Listener[Message]) -> None:
        with listener:
            while not self._closing:
                incoming = listener.receive_now()
                if incoming is not None:
                    self._handle(listener, incoming)
                elif not self._pack(listener):
                    self._wait(listener)

    def _wait(self, listener: Listener[Message]) -> None:
        try:
            incoming = listener.receive_or_wake(Deadline.after(_IDLE_S), "a rank")
        except DeadlineExceeded:
            return
        if incoming is not None:
            self._handle(listener, incoming)

    def _handle(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        match incoming.body:
            case Subscribe() as body:
                try:
                    reply: Message = self._subscribe(incoming.peer, body)
                except LiveWeightError as error:
                    reply = Refusal(fault=fault_of(error, step="subscribe"))
                self._send(listener, incoming.peer, reply, incoming.call)
            case SegmentFree(number=number, bucket=bucket):
                with self._changed:
                    found = self._assignments.find(incoming.peer, number)
                    if found is not None:
                        self._assignments.freed(found, bucket)
            case RepackBucket(number=number, bucket=bucket):
                self._repack(incoming.peer, number, bucket)
            case Unsubscribe(number=number, staged=staged):
                self._unsubscribe(incoming.peer, number, staged=staged)
            case other:
                strange = MessageInvalid(f"a ring expects Subscribe, not {type(other).__name__}")
                refusal = Refusal(fault=fault_of(strange, step="subscribe"))
                self._send(listener, incoming.peer, refusal, incoming.call)

    def _subscribe(self, peer: bytes, body: Subscribe) -> Subscribed:
        if body.parcels is not None:
            self._keep(body.stream, body.parcels)
        stream = self._streams.get(body.stream)
        with self._changed:
            self._assignments.unsubscribe(peer)
            current = self._offers.get(body.layout)
            stands = current is not None and current.generation == body.generation
            if current is None or not stands or stream is None:
                return Subscribed(known=stream is not None, stands=stands)
            packing = current.packings.get(body.stream)
        if packing is None:
            packing = BucketPacking(current.packing_source, stream, self._segments)
        with self._changed:
            if current.generation != body.generation:
                return Subscribed(known=True, stands=False)
            current.packings[body.stream] = packing
            if body.stream not in current.order:
                current.order.append(body.stream)
            subscription = RingSubscription(
                peer=peer,
                number=body.number,
                layout=body.layout,
                stream=body.stream,
                buckets=packing.buckets,
            )
            self._assignments.subscribe(subscription)
        return Subscribed(known=True, stands=True)

    def _keep(self, name: str, parcels: Layout) -> None:
        """Refuse parcels that are not what they are called, or do not fit into segments; keep the most recent ones."""
        if parcels.fingerprint != name:
            raise MessageInvalid("parcels under a name that is not theirs")
        if max(parcels.memories_bytes, default=0) > self.settings.segment_bytes:
            raise MessageInvalid(f"buckets of more than {self.settings.segment_bytes} bytes")
        memories = [parcel.memory for parcel in parcels.placements]
        if memories != sorted(memories):
            raise MessageInvalid("parcels that are not in the order of their buckets")
        self._streams[name] = parcels
        while len(self._streams) > _STREAMS_KEPT:
            del self._streams[next(iter(self._streams))]

    def _repack(self, peer: bytes, number: int, bucket: int) -> None:
        with self._changed:
            found = self._assignments.find(peer, number)
            current = None if found is None else self._offers.get(found.layout)
            if found is None or current is None or bucket not in found.held:
                return
            self._assignments.repack(found, bucket)
            tensor = current.packings[found.stream].first_tensor(bucket)
            current.damaged.append(DamagedBucket(bucket=bucket, tensor=tensor))

    def _unsubscribe(self, peer: bytes, number: int, *, staged: bool) -> None:
        with self._changed:
            found = self._assignments.find(peer, number)
            if found is None:
                return
            current = self._offers.get(found.layout)
            if current is not None:
                current.staged += staged
            self._assignments.unsubscribe(peer)

    def _pack(self, listener: Listener[Message]) -> bool:
        """Pack one bucket and hand it over. Returns whether there was one."""
        with self._changed:
            job = self._assignments.next_job()
            current = None if job is None else self._offers.get(job.subscription.layout)
            if job is None or current is None:
                return False
            self._packing = job.subscription.layout
        body: Message | None = None
        try:
            body = self._packed(current, job)
        finally:
            with self._changed:
                self._packing = None
                stands = (
                    self._assignments.find(job.subscription.peer, job.subscription.number) is job.subscription
                )
                self._changed.notify_all()
        if stands and body is not None:
            self._send(listener, job.subscription.peer, body, call=0)
            if isinstance(body, Refusal):
                self._unsubscribe(job.subscription.peer, job.subscription.number, staged=False)
        return True

    def _packed(self, current: _RingOffer, job: PackJob) -> Message:
        subscription = job.subscription
        try:
            size, checksum = current.packings[subscription.stream].pack(job.bucket, job.segment)
        except LiveWeightError as error:
            return Refusal(fault=fault_of(error, step="stage"))
        except Exception as error:  # not a LiveWeightError: the rank gets the reason, and the ring goes on
            cause = Unavailable(f"the source could not pack: {type(error).__name__}: {error}")
            return Refusal(fault=fault_of(cause, step="stage"))
        current.buckets += 1
        current.size_bytes += size
        return BucketFilled(
            number=subscription.number,
            bucket=job.bucket,
            segment=job.segment,
            size_bytes=size,
            sum=checksum,
        )

    def _send(self, listener: Listener[Message], peer: bytes, body: Message, call: int) -> None:
        """Send without waiting. A rank that is gone or does not read its messages loses its segments."""
        try:
            listener.send(peer, body, call, Deadline.after(0.0))
        except (ChannelClosed, DeadlineExceeded):
            with self._changed:
                self._assignments.unsubscribe(peer)
