"""The source half of `ipc`: says where a layout's memory lies, and hands out its descriptors.

Owns two sockets, the thread that answers ranks, and the registrations. Whoever allocates an arena owns it and decides when its bytes may
change; this half never touches them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from liveweight.devices.device import CPU, Device
from liveweight.errors import (
    LayoutInvalid,
    LiveWeightError,
    Refused,
    VersionNotOffered,
)
from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.transports.attach import AttachServer
from liveweight.transports.ipc.arena import SharedArena, combined
from liveweight.transports.ipc.device_arena import (
    TOKEN_BYTES,
    DeviceArena,
    SourceArena,
    device_of,
    parse_attach_name,
)
from liveweight.transports.ipc.ring_arena import RingArena
from liveweight.transports.ipc.ring_source import Ring
from liveweight.transports.packing_source import PackingSource, RingSettings
from liveweight.transports.port import Arena
from liveweight.transports.registry import mode
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.descriptor_server import DescriptorServer
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Attach, Attached, Message, Refusal
from liveweight.wire.messages.values import Offer, fault_of

MODE = "ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    """The answer to ranks that attach to a layout, and the arenas behind it."""

    attached: Attached
    arenas: tuple[SourceArena | RingArena, ...]
    device: Device

    def answer_for_rank(self) -> Attached:
        """The answer for one more rank: with a new handle for each memory that needs one."""
        if self.device.handles is None:
            return self.attached
        entries = zip(self.attached.memories, self.arenas, strict=True)
        memories = tuple(token + arena.handle() for token, arena in entries if isinstance(arena, SourceArena))
        return msgspec.structs.replace(self.attached, memories=memories)


class IpcSource:
    """Lets ranks on this host read arenas. One per publisher; `offer`, `withdraw` and `close` come from its driver thread.

    A registration lasts across rounds: ranks attach once, and only the generation moves.
    """

    def __init__(
        self,
        directory: Path,
        secret: Secret,
        *,
        device: Device | None = None,
        name: str | None = None,
        limits: WireLimits | None = None,
    ) -> None:
        """Listen in that directory, which must be ours alone; under a fixed name only where ranks are configured with it.

        Arenas are allocated on `device`; None: in host memory.
        """
        self._device = CPU if device is None else device
        self._secret = secret
        self._ring: Ring | None = None
        name = secrets.token_hex(8) if name is None else name
        self._limits = limits or WireLimits()
        self._codec: Codec[Message] = Codec(Message)
        self._lock = threading.Lock()
        self._registrations: dict[tuple[OfferKind, str], _Registration] = {}
        address = f"ipc://{directory / name}"
        self._ring_address = f"{address}.ring"
        self._server = AttachServer(
            address, secret, self._limits, self._reply, name="liveweight-ipc-source", request=Attach
        )
        try:
            self._descriptors = DescriptorServer(directory / f"{name}.fds", secret, self._limits)
        except BaseException:
            self._server.abandon()
            raise
        self._server.start()

    @property
    def address(self) -> str:
        """Where ranks attach."""
        return self._server.address

    def allocate(
        self, size_bytes: int, kind: OfferKind = "frozen", *, populated: bool = True
    ) -> SourceArena | RingArena:
        """An arena of that size, the caller's to close; OutOfMemory where it cannot be had. A ring's is private memory."""
        return (
            RingArena(size_bytes)
            if kind == "ring"
            else allocate(size_bytes, self._device, populated=populated)
        )

    def ring(self, settings: RingSettings | None = None) -> Ring:
        """The ring that offers are packed into: made at its first use, and made anew for other settings."""
        if self._device.handles is not None:
            raise Refused(f"ring offers lie in host memory, and this source's are on {self._device.name}")
        if self._ring is not None and settings not in (None, self._ring.settings):
            self._close_ring()
        if self._ring is None:
            self._ring = Ring(self._ring_address, self._secret, settings or RingSettings(), self._limits)
        return self._ring

    def offer(self, layout: Layout, arenas: Sequence[Arena], kind: OfferKind) -> Offer:
        """Let ranks read these arenas (one per memory of the layout), as they are now. Other arenas replace those of before."""
        _check_kind(kind)
        if kind == "ring":
            return self._offer_arenas(layout, arenas)
        shared = _fitting(layout, arenas)
        device = device_of(shared, self._device)
        device.synchronise()
        with self._lock:
            known = self._registrations.get((kind, layout.fingerprint))
        if known is None or known.arenas != shared:
            self._register(layout, shared, kind, device)
        return self._offer_of(layout, shared, kind)

    def _offer_of(self, layout: Layout, arenas: Sequence[Arena], kind: OfferKind) -> Offer:
        generation = combined(arena.generation for arena in arenas)
        return Offer(
            mode=MODE, kind=kind, source=self.address, layout=layout.fingerprint, generation=generation
        )

    def offer_packing_source(
        self, packing_source: PackingSource, arenas: Sequence[Arena], settings: RingSettings | None = None
    ) -> Offer:
        """Let ranks have this packing source packed for them, as it is now; the arenas carry the generation, and are `allocate`d as a
        ring's."""
        pages = tuple(arena for arena in arenas if isinstance(arena, RingArena))
        if not pages or len(pages) != len(arenas):
            raise LayoutInvalid("ring offers are revoked by arenas that were allocated for a ring")
        ring, layout = self.ring(settings), packing_source.offered
        with self._lock:
            known = self._registrations.get(("ring", layout.fingerprint))
        if known is None or known.arenas != pages or known.attached.ring != ring.terms:
            self._register(layout, pages, "ring", CPU, ring)
        offer = self._offer_of(layout, pages, "ring")
        ring.offer(packing_source, offer.generation)
        return offer

    def _offer_arenas(self, layout: Layout, arenas: Sequence[Arena]) -> Offer:
        """A ring that is packed from arenas of ours, one per memory of the layout."""
        sizes = tuple(arena.size_bytes for arena in arenas if isinstance(arena, RingArena))
        if sizes != layout.memories_bytes or len(sizes) != len(arenas):
            raise LayoutInvalid(f"a ring's arenas of {sizes} bytes for a layout of {layout.memories_bytes}")
        packing_source = PackingSource(
            offered=layout,
            held=layout,
            memories=[arena.memory for arena in arenas],
            kernels=self._device.choose().kernels,
        )
        return self.offer_packing_source(packing_source, arenas)

    def withdraw(self, layout: Layout) -> None:
        """Stop offering that layout. Until then, this half keeps the memory of its arenas, closed or not."""
        if self._ring is not None:
            self._ring.withdraw(layout.fingerprint)
        with self._lock:
            keys = [key for key in self._registrations if key[1] == layout.fingerprint]
        for key in keys:
            self._withdraw(key)

    def _withdraw(self, key: tuple[OfferKind, str]) -> None:
        with self._lock:
            known = self._registrations.pop(key, None)
        if known is not None:
            self._drop(known.attached.memories)

    def close(self) -> None:
        """End the threads and remove the sockets. The owner of the arenas closes them. May be called twice."""
        self._close_ring()
        self._server.close()
        self._descriptors.close()
        self._registrations.clear()

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _register(
        self,
        layout: Layout,
        arenas: tuple[SourceArena | RingArena, ...],
        kind: OfferKind,
        device: Device,
        ring: Ring | None = None,
    ) -> None:
        mapped = [arena.descriptor for arena in (*(() if ring is None else (ring.arena,)), *arenas)]
        tokens = tuple(secrets.token_bytes(TOKEN_BYTES) for _ in mapped)
        terms = None if ring is None else ring.terms
        attached = Attached(
            layout=layout, memories=tokens, descriptors=str(self._descriptors.path), ring=terms
        )
        self._codec.encode(
            attached, call=1, limits=self._limits
        )  # refuses a layout that is too large for one message
        self._withdraw((kind, layout.fingerprint))
        try:
            for token, descriptor in zip(tokens, mapped, strict=True):
                self._descriptors.register(token, [descriptor])
        except BaseException:
            self._drop(tokens)
            raise
        with self._lock:
            self._registrations[kind, layout.fingerprint] = _Registration(
                attached=attached, arenas=arenas, device=device
            )

    def _drop(self, tokens: Sequence[bytes]) -> None:
        for token in tokens:
            self._descriptors.withdraw(token)

    def _reply(self, body: Attach) -> Message:
        layout, where = parse_attach_name(body.layout)
        with self._lock:
            known = self._registrations.get((body.kind, layout))
            offered = [f"{kind} layout {fingerprint}" for kind, fingerprint in self._registrations]
        if known is None:
            refused = VersionNotOffered(f"{body.kind} layout {layout}", offered)
            return Refusal(fault=fault_of(refused, step="attach"))
        if where != known.device.identity:
            elsewhere = LayoutInvalid(
                f"the source's memory is on {known.device.identity}, and this rank reads on {where}"
            )
            return Refusal(fault=fault_of(elsewhere, step="attach"))
        try:
            return known.answer_for_rank()
        except LiveWeightError as error:  # closed meanwhile, or a device that does not lend
            return Refusal(fault=fault_of(error, step="attach"))


def _check_kind(kind: OfferKind) -> None:
    offers = mode(MODE).offers
    if kind not in offers:
        raise Refused(f"{MODE} has no {kind} offers, only {', '.join(offers)}")


def allocate(size_bytes: int, device: Device, *, populated: bool = True) -> SourceArena:
    """An arena that ranks on that device of this host can read. OutOfMemory where it cannot be had."""
    return (
        SharedArena(size_bytes, populated=populated)
        if device.handles is None
        else DeviceArena(size_bytes, device)
    )


def _fitting(layout: Layout, arenas: Sequence[Arena]) -> tuple[SourceArena, ...]:
    """The arenas, if they are the layout's memories and ranks can map them."""
    shared = tuple(arena for arena in arenas if isinstance(arena, SourceArena))
    if len(shared) != len(arenas):
        raise LayoutInvalid("ipc offers only memory that it allocated itself")
    sizes = tuple(arena.size_bytes for arena in shared)
    if sizes != layout.memories_bytes:
        raise LayoutInvalid(f"arenas of {sizes} bytes for a layout of {layout.memories_bytes}")
    return shared
