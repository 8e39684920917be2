"""The rank half of `ipc`: maps a source's arenas, and copies the regions that the rank owns out of them.

Owns the attachments: mappings that last across rounds, with their plans and bound tables. The shadow is the rank's: a binding that
is kept knows its addresses but does not hold it; a Reading does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Bound, Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import MessageInvalid
from liveweight.observe.events import OfferKind
from liveweight.plan.copies import CopyPlans, split
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.attach import ask_source
from liveweight.transports.attachment_cache import evict_oldest
from liveweight.transports.ipc.arena import CLOSED, MappedArena, combined
from liveweight.transports.ipc.device_arena import TOKEN_BYTES, BorrowedArena, RankArena, attach_name
from liveweight.transports.ipc.ring_attachments import RingReader
from liveweight.transports.port import GoOn, Reading, check_generation, patient
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.descriptors import close_all, fetch
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Message
from liveweight.wire.messages.values import Offer
from liveweight.wire.sockets import nobody_listens

ROW_BYTES = 4 << 20
"""What one row of a reading copies at most: the grain of sharing out, pacing and interrupting."""
_ATTACHMENTS_KEPT = 4
_BINDINGS_KEPT = 4

_ShadowKey: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A target's fingerprint, and where and how large the memories of a shadow are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binding:
    """Copies with their addresses. Good for every shadow at these addresses."""

    rows: Table
    bound: Bound


class _Attachment:
    """One layout of one source, mapped, and what was bound to it."""

    def __init__(self, layout: Layout, arenas: Sequence[RankArena]) -> None:
        self.layout, self.arenas = layout, tuple(arenas)
        self.bindings: dict[_ShadowKey, _Binding] = {}

    @property
    def generation(self) -> int:
        """What the arenas say now, as offers carry it."""
        return combined(arena.generation for arena in self.arenas)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcReading:
    """A rank's part of one offer. Holds the mappings and the shadow while it lives."""

    offer: Offer
    rows: Table
    bound: Bound
    attachment: _Attachment
    shadow: tuple[Memory, ...]
    overlaps: bool = False

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:  # noqa: ARG002 - it never waits
        """Copy rows [first, last) into the shadow, with the GIL released."""
        self.bound.run(first, last)

    def check(self) -> None:
        """Raise OfferChanged if the source has revoked the offer: what was read may be a mixture."""
        check_generation(self.offer, self.attachment.generation)

    def end(self) -> None:
        """Nothing is under way: a read is over when it returns."""


class IpcReader:
    """Reads offers of sources on this host, from one device (None: the host's memory) to shadows on the same one.

    One per rank, used by its staging thread.
    """

    def __init__(
        self,
        secret: Secret,
        kernels: Kernels,
        *,
        device: Device | None = None,
        limits: WireLimits | None = None,
    ) -> None:
        self._secret, self._kernels = secret, kernels
        self._device = CPU if device is None else device
        self._limits = limits or WireLimits()
        self._codec: Codec[Message] = Codec(Message)
        self._plans = CopyPlans()
        self._attachments: dict[tuple[str, str, OfferKind], _Attachment] = {}
        self._rings = RingReader(secret, kernels, self._device, self._limits)
        self._requests = 0

    @property
    def requests(self) -> int:
        """How often a source was asked where its memory lies."""
        return self._requests + self._rings.requests

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline) -> Reading:
        """Attach to the offer's source if need be, plan if need be, and bind to this shadow."""
        # Whatever the kind of what is kept: a killed source's ring may be followed by an arena of its successor.
        self._forget_gone(self._sources - {offer.source})
        if offer.kind == "ring":
            return self._rings.bind(offer, target, shadow, deadline)
        return self.bind_arenas(offer, target, shadow, deadline)

    def bind_arenas(
        self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline
    ) -> IpcReading:
        """The same for offers whose arenas ranks read themselves."""
        attachment = self._attachment(offer, deadline)
        binding = self._binding(attachment, target, shadow)
        return IpcReading(
            offer=offer,
            rows=binding.rows,
            bound=binding.bound,
            attachment=attachment,
            shadow=tuple(shadow),
        )

    def _binding(self, attachment: _Attachment, target: Layout, shadow: Sequence[Memory]) -> _Binding:
        """Kept for the host's memory, whose addresses are enough. A device's is bound anew: its kernels need the tensors."""
        if self._device.handles is not None:
            return self._bind(attachment, target, shadow)
        shadow_key = (
            target.fingerprint,
            tuple([m.address for m in shadow]),
            tuple([m.size_bytes for m in shadow]),
        )
        binding = attachment.bindings.pop(shadow_key, None)
        if binding is None:
            unheld = [dataclasses.replace(memory, owner=None) for memory in shadow]
            binding = self._bind(attachment, target, unheld)
        attachment.bindings[shadow_key] = binding
        evict_oldest(attachment.bindings, _BINDINGS_KEPT)
        return binding

    def forget(self, source: str) -> None:
        """Drop what is kept about a source. Its memory is unmapped once no Reading holds it."""
        self._rings.forget(source)
        for key in [key for key in self._attachments if key[0] == source]:
            del self._attachments[key]

    def close(self) -> None:
        """Release all mappings. May be called twice."""
        self._rings.close()
        self._attachments.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attachment(self, offer: Offer, deadline: Deadline) -> _Attachment:
        """The kept attachment if it still fits the offer, else a new one.

        A source that began again, or took other arenas, shows in the generation: the first one of an arena is random.
        """
        self._forget_closed()
        key = (offer.source, offer.layout, offer.kind)
        attachment = self._attachments.pop(key, None)
        if attachment is not None and attachment.generation != offer.generation:
            attachment = None  # unmapped here, before the new memory is mapped
        if attachment is None:
            self._forget_gone(self._sources)
            attachment = self._attach(offer, deadline)
        self._attachments[key] = attachment
        evict_oldest(self._attachments, _ATTACHMENTS_KEPT)
        return attachment

    def _forget_closed(self) -> None:
        """Unmap arenas that their source has closed."""
        for key in [key for key, kept in self._attachments.items() if kept.generation == CLOSED]:
            del self._attachments[key]

    @property
    def _sources(self) -> set[str]:
        return {key[0] for key in self._attachments} | self._rings.sources

    def _forget_gone(self, sources: Iterable[str]) -> None:
        """Unmap the arenas of sources that have exited: only our mapping keeps the memory alive."""
        for source in sources:
            if nobody_listens(source, Deadline.after(0.0)):
                self.forget(source)

    def _attach(self, offer: Offer, deadline: Deadline) -> _Attachment:
        self._requests += 1
        wanted = attach_name(offer.layout, self._device)
        attached = ask_source(offer, wanted, self._secret, self._codec, self._limits, deadline)
        sizes = attached.layout.memories_bytes
        if len(attached.memories) != len(sizes):
            raise MessageInvalid(f"{offer.source} answered with other memories than its layout has")
        path = Path(attached.descriptors)
        arenas = [
            self._map(path, entry, size, deadline)
            for entry, size in zip(attached.memories, sizes, strict=True)
        ]
        return _Attachment(attached.layout, arenas)

    def _map(self, path: Path, entry: bytes, size_bytes: int, deadline: Deadline) -> RankArena:
        token, handle = entry[:TOKEN_BYTES], entry[TOKEN_BYTES:]
        descriptors = fetch(path, self._secret, token, deadline, self._limits)
        try:
            if len(descriptors) != 1:
                raise MessageInvalid(f"{path} handed out {len(descriptors)} descriptors for one memory")
            if self._device.handles is None:
                return MappedArena(descriptors[0], size_bytes)
            return BorrowedArena(descriptors[0], handle, size_bytes, self._device)
        finally:
            close_all(descriptors)

    def _bind(self, attachment: _Attachment, target: Layout, shadow: Sequence[Memory]) -> _Binding:
        rows = split(self._plans.get(attachment.layout, target).rows, ROW_BYTES)
        sources = [arena.memory for arena in attachment.arenas]
        return _Binding(rows=rows, bound=self._kernels.bind_copy(rows, sources, shadow))
