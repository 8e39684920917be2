"""A rank's attachments to rings, kept across rounds: links, generation pages, plans and bound copies.

Used by the rank's staging thread. The messages over a link are in ring_reader.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from liveweight.devices.device import Device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, MessageInvalid
from liveweight.plan.copies import split
from liveweight.plan.parcels import ParcelPlan, plan_parcels
from liveweight.plan.unpacking import plan_unpacking
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.transports.attach import ask_source
from liveweight.transports.attachment_cache import evict_oldest
from liveweight.transports.ipc.arena import CLOSED, MappedArena, combined
from liveweight.transports.ipc.ring_arena import segments_of
from liveweight.transports.ipc.ring_reader import BoundUnpacking, RingBinding, RingLink, RingReading
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.descriptors import close_all, fetch
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Attached, Message
from liveweight.wire.messages.values import Offer, RingGeometry
from liveweight.wire.sockets import nobody_listens

_KEPT = 4
_ROW_BYTES = 4 << 20
"""What a thread takes at a time, at the most; it copies the whole bucket that this lies in."""

_ShadowKey: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...]]
"""Fingerprints of source and target, and where and how large the memories of a shadow are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attachment:
    """One layout of one source: the pages that say whether its offer stands, and the link to the ring that it is packed into."""

    layout: Layout
    pages: tuple[MappedArena, ...]
    terms: RingGeometry

    @property
    def generation(self) -> int:
        """What the pages say now, as offers carry it."""
        return combined(page.generation for page in self.pages)


class RingReader:
    """Reads ring offers of sources on this host, to shadows in host memory."""

    def __init__(self, secret: Secret, kernels: Kernels, device: Device, limits: WireLimits) -> None:
        self._secret, self._kernels, self._device, self._limits = secret, kernels, device, limits
        self._codec: Codec[Message] = Codec(Message)
        self._attachments: dict[tuple[str, str], _Attachment] = {}
        self._links: dict[tuple[str, str], RingLink] = {}
        self._plans: dict[tuple[str, str, int], ParcelPlan] = {}
        self._bindings: dict[_ShadowKey, tuple[RingLink, RingBinding]] = {}
        self.requests = 0
        """How often a source was asked where its memory lies."""

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline) -> RingReading:
        """Attach to the offer's ring if need be, plan if need be, and subscribe: packing begins."""
        if self._device.handles is not None:
            raise LayoutInvalid(
                f"ring offers lie in host memory, and this rank reads on {self._device.identity}"
            )
        attachment = self._attachment(offer, deadline)
        link = self._links[offer.source, attachment.terms.address]
        binding = self._binding(link, attachment, target, shadow)
        number = link.subscribe(offer, binding.stream, deadline)
        return RingReading(offer, binding, link, attachment.pages, shadow, number)

    @property
    def sources(self) -> set[str]:
        """Those that anything is kept about."""
        return {source for source, _ in (*self._links, *self._attachments)}

    def forget(self, source: str) -> None:
        """Drop what is kept about a source, and close the links to it."""
        for key in [key for key in self._attachments if key[0] == source]:
            del self._attachments[key]
        for name in [name for name in self._links if name[0] == source]:
            self._close(name)

    def close(self) -> None:
        """Release all mappings and channels. May be called twice."""
        for source, _ in list(self._links):
            self.forget(source)
        self._attachments.clear()

    def _close(self, name: tuple[str, str]) -> None:
        link = self._links.pop(name)
        for shadow_key in [shadow_key for shadow_key, kept in self._bindings.items() if kept[0] is link]:
            del self._bindings[shadow_key]
        link.close()

    def _attachment(self, offer: Offer, deadline: Deadline) -> _Attachment:
        """The kept attachment if it still fits the offer, else a new one. Sources that are gone are forgotten first."""
        for key in [key for key, kept in self._attachments.items() if kept.generation == CLOSED]:
            del self._attachments[key]
        name = (offer.source, offer.layout)
        attachment = self._attachments.pop(name, None)
        if attachment is None or attachment.generation != offer.generation:
            for source in {source for source, _ in self._links}:
                if nobody_listens(source, Deadline.after(0.0)):
                    self.forget(source)
            attachment = self._attach(offer, deadline)
        self._attachments[name] = attachment
        evict_oldest(self._attachments, _KEPT)
        return attachment

    def _attach(self, offer: Offer, deadline: Deadline) -> _Attachment:
        self.requests += 1
        attached = ask_source(offer, offer.layout, self._secret, self._codec, self._limits, deadline)
        if attached.ring is None or len(attached.memories) < 2:
            raise MessageInvalid(f"{offer.source} answered without a ring")
        path, (token, *tokens) = Path(attached.descriptors), attached.memories
        pages = tuple(self._map(path, page, 0, deadline) for page in tokens)
        self._link(offer, attached, path, token, deadline)
        return _Attachment(layout=attached.layout, pages=pages, terms=attached.ring)

    def _link(self, offer: Offer, attached: Attached, path: Path, token: bytes, deadline: Deadline) -> None:
        """Connect to the ring and map it, unless that is done already."""
        terms = attached.ring
        if terms is None or (offer.source, terms.address) in self._links:
            return
        arena = self._map(path, token, terms.segments * terms.segment_bytes, deadline)
        channel = Channel(
            terms.address, self._secret, self._codec, self._limits, deadline=deadline, waits=False
        )
        segments = segments_of(arena.memory, terms.segments, terms.segment_bytes)
        self._links[offer.source, terms.address] = RingLink(channel, arena, segments)

    def _map(self, path: Path, token: bytes, size_bytes: int, deadline: Deadline) -> MappedArena:
        descriptors = fetch(path, self._secret, token, deadline, self._limits)
        try:
            if len(descriptors) != 1:
                raise MessageInvalid(f"{path} handed out {len(descriptors)} descriptors for one memory")
            return MappedArena(descriptors[0], size_bytes)
        finally:
            close_all(descriptors)

    def _binding(
        self, link: RingLink, attachment: _Attachment, target: Layout, shadow: Sequence[Memory]
    ) -> RingBinding:
        """Kept by the shadow's addresses: it knows them, and does not hold the shadow."""
        shadow_key = (
            attachment.layout.fingerprint,
            target.fingerprint,
            tuple([m.address for m in shadow]),
            tuple([m.size_bytes for m in shadow]),
        )
        kept = self._bindings.pop(shadow_key, None)
        if kept is None or kept[0] is not link:
            kept = link, self._bind(link, self._plan(attachment, target), shadow)
        self._bindings[shadow_key] = kept
        evict_oldest(self._bindings, _KEPT)
        return kept[1]

    def _plan(self, attachment: _Attachment, target: Layout) -> ParcelPlan:
        size = attachment.terms.segment_bytes
        key = (attachment.layout.fingerprint, target.fingerprint, size)
        plan = self._plans.pop(key, None) or plan_parcels(attachment.layout, target, size)
        self._plans[key] = plan
        evict_oldest(self._plans, _KEPT)
        return plan

    def _bind(self, link: RingLink, plan: ParcelPlan, shadow: Sequence[Memory]) -> RingBinding:
        unheld, kernels, segments = _unheld(shadow), self._kernels, link.segments
        tables = plan_unpacking(plan)

        def bind(segment: int) -> BoundUnpacking:
            source = [segments[segment]]
            return BoundUnpacking(
                moves=kernels.bind_freeze(tables.moves.rows, source, unheld, tables.slots),
                reads=kernels.bind_digest(tables.reads.rows, source, tables.slots),
                copies=kernels.bind_copy(tables.copies.rows, source, unheld),
            )

        rows = split(plan.rows, _ROW_BYTES)
        _, starts = np.unique(rows[:, 0], return_index=True)
        return RingBinding(stream=plan.stream, rows=rows, starts=starts, unpacking=tables, bind=bind)


def _unheld(memories: Sequence[Memory]) -> list[Memory]:
    return [dataclasses.replace(memory, owner=None) for memory in memories]
