"""The source half of `gdr` and `rdma`: has a registration process register its arenas, and sends ranks their locations.

Owns the socket that ranks attach to, the registration process and the registrations, which last across rounds: only the generation changes.
Whoever allocates an arena owns it. Both modes read the same memory in the same way; what differs is where a rank lets it land.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.device import CPU, Device
from liveweight.errors import LayoutInvalid, LiveWeightError, Refused, VersionNotOffered
from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.transports.attach import AttachServer
from liveweight.transports.ipc.arena import SharedArena, combined
from liveweight.transports.nixl.arena_location import ArenaLocation
from liveweight.transports.nixl.registration_client import RegisteredArena, RegistrationClient
from liveweight.transports.port import Arena
from liveweight.transports.registry import check_installed, mode
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Attach, Attached, Message, Refusal
from liveweight.wire.messages.values import Offer, fault_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    """A layout, whose memory it is, and how readers reach it."""

    layout: Layout
    arenas: tuple[SharedArena, ...]
    registered: tuple[RegisteredArena, ...]

    def attached(self) -> Attached:
        """The answer to a rank that attaches."""
        locations = [
            ArenaLocation(
                address=registered.address, size_bytes=arena.size_bytes, description=registered.description
            ).encode()
            for registered, arena in zip(self.registered, self.arenas, strict=True)
        ]
        return Attached(layout=self.layout, memories=tuple(locations), descriptors="")


class NixlSource:
    """Lets ranks on any host read arenas. One per publisher; `offer`, `withdraw` and `close` come from its driver thread."""

    def __init__(
        self,
        directory: Path,
        secret: Secret,
        *,
        name: str,
        device: Device | None = None,
        host: str | None = None,
        limits: WireLimits | None = None,
    ) -> None:
        """Listen for ranks of other hosts at an address of this one, `host`; None: for those of this host, in that directory."""
        check_installed(mode(name))
        if device is not None and device is not CPU:
            raise Refused(f"{name} offers host memory, and this source is on {device.name}")
        self._mode, self._limits = name, limits or WireLimits()
        self._lock = threading.Lock()
        self._registrations: dict[tuple[OfferKind, str], _Registration] = {}
        self._registration_client = RegistrationClient()
        address = f"ipc://{directory / secrets.token_hex(8)}" if host is None else f"tcp://{host}:0"
        self._server = AttachServer(
            address, secret, self._limits, self._reply, name="liveweight-nixl-source", request=Attach
        )
        self._server.start()

    @property
    def address(self) -> str:
        """Where ranks attach."""
        return self._server.address

    @property
    def registration_pid(self) -> int | None:
        """The process id of the registration process; None while there is none."""
        return self._registration_client.pid

    def allocate(
        self,
        size_bytes: int,
        kind: OfferKind = "frozen",  # noqa: ARG002 - all alike
        *,
        populated: bool = True,
    ) -> SharedArena:
        """An arena of that size, the caller's to close; OutOfMemory where it cannot be had."""
        return SharedArena(size_bytes, populated=populated)

    def offer(self, layout: Layout, arenas: Sequence[Arena], kind: OfferKind) -> Offer:
        """Let ranks read these arenas (one per memory of the layout), as they are now. Other arenas replace those of before."""
        offers = mode(self._mode).offers
        if kind not in offers:
            raise Refused(f"{self._mode} has no {kind} offers, only {', '.join(offers)}")
        shared = _fitting(self._mode, layout, arenas)
        with self._lock:
            known = self._registrations.get((kind, layout.fingerprint))
            if (
                known is None
                or known.arenas != shared
                or not all(map(self._registration_client.is_registered, known.registered))
            ):
                self._register(layout, shared, kind)
        return Offer(
            mode=self._mode,
            kind=kind,
            source=self.address,
            layout=layout.fingerprint,
            generation=combined(arena.generation for arena in shared),
        )

    def withdraw(self, layout: Layout) -> None:
        """Stop offering that layout."""
        with self._lock:
            for key in [key for key in self._registrations if key[1] == layout.fingerprint]:
                self._drop(self._registrations.pop(key))

    def close(self) -> None:
        """End the thread, the socket and the registration process. The owner of the arenas closes them. May be called
        twice."""
        self._server.close()
        with self._lock:
            self._registrations.clear()
            self._registration_client.close()

    def _register(self, layout: Layout, arenas: tuple[SharedArena, ...], kind: OfferKind) -> None:
        known = self._registrations.pop((kind, layout.fingerprint), None)
        if known is not None:
            self._drop(known)
        registered = tuple(self._registration_client.register(arena) for arena in arenas)
        self._registrations[kind, layout.fingerprint] = _Registration(
            layout=layout, arenas=arenas, registered=registered
        )

    def _drop(self, registration: _Registration) -> None:
        for registered in registration.registered:
            self._registration_client.unregister(registered)

    def _reply(self, body: Attach) -> Message:
        """To a rank that attaches: where the memory lies. A registration process that was lost since the offer is replaced here."""
        with self._lock:
            known = self._registrations.get((body.kind, body.layout))
            if known is None:
                offered = [f"{kind} layout {layout}" for kind, layout in self._registrations]
                refused = VersionNotOffered(f"{body.kind} layout {body.layout}", offered)
                return Refusal(fault=fault_of(refused, step="attach"))
            try:
                if not all(map(self._registration_client.is_registered, known.registered)):
                    self._register(known.layout, known.arenas, body.kind)
                return self._registrations[body.kind, body.layout].attached()
            except (
                LiveWeightError,
                OSError,
            ) as error:  # an arena was closed meanwhile, or the registration process cannot start
                cause = error if isinstance(error, LiveWeightError) else LayoutInvalid(str(error))
                return Refusal(fault=fault_of(cause, step="attach"))


def _fitting(name: str, layout: Layout, arenas: Sequence[Arena]) -> tuple[SharedArena, ...]:
    """The arenas, if they are the layout's memories and lie in shared host memory."""
    shared = tuple(arena for arena in arenas if isinstance(arena, SharedArena))
    if len(shared) != len(arenas):
        raise LayoutInvalid(f"{name} offers only shared host memory")
    sizes = tuple(arena.size_bytes for arena in shared)
    if sizes != layout.memories_bytes:
        raise LayoutInvalid(f"arenas of {sizes} bytes for a layout of {layout.memories_bytes}")
    return shared
