"""Arenas in the memory of a device: lent by handle, with their generation in a page of shared host memory.

Owns both ends, and how the two halves of `ipc` name devices. The generation lies in an arena without data (arena.py): processes raise and
read it, never a device. devices/ makes and opens the handles.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeAlias

from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, MessageInvalid, WrongState
from liveweight.transports.ipc.arena import MappedArena, SharedArena

TOKEN_BYTES = 16
"""What a memory's entry begins with: the token of its descriptor. Behind it comes the handle, where there is one."""
_AT = "@"


class DeviceArena:
    """The source's end, in memory of its own storage. Used by the publisher's driver thread; handles are made by the serving one."""

    def __init__(self, size_bytes: int, device: Device) -> None:
        """Allocate it. OutOfMemory where it cannot be had; nothing is left behind then."""
        self.size_bytes, self.device = size_bytes, device
        (whole,) = device.allocate([_lent_bytes(size_bytes)], "an arena")
        self._memory: Memory | None = Memory.of_view(whole)
        self._page = SharedArena(0)

    @property
    def descriptor(self) -> int:
        """The page of the generation."""
        return self._page.descriptor

    @property
    def memory(self) -> Memory:
        """The data. Its owner is a tensor of the bytes: whoever holds it, or a view of it, holds them."""
        memory = self._memory
        if memory is None:
            raise WrongState("closed", "using an arena")
        return memory

    @property
    def generation(self) -> int:
        """What the page says now."""
        return self._page.generation

    def raise_generation(self) -> int:
        """Revoke every reader; returns the new generation. What changes the bytes is queued after this, so it comes after."""
        return self._page.raise_generation()

    def handle(self) -> bytes:
        """For one more reader."""
        if self.device.handles is None:
            raise LayoutInvalid(f"memory of {self.device.name} is not lent by handle")
        return self.device.handles.lend(self.memory)

    def close(self) -> None:
        """Release the memory. The device frees it when the last view and the last reader are gone."""
        self._memory = None
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BorrowedArena:
    """A rank's end: read-only. The handle is given back with the last one who holds this or its memory."""

    def __init__(self, descriptor: int, handle: bytes, size_bytes: int, device: Device) -> None:
        """Map the page of the generation, and open the handle. The descriptor stays the caller's and is not needed after."""
        if device.handles is None or not handle:
            raise MessageInvalid(f"the source handed out no memory that {device.name} can open")
        self._page = MappedArena(descriptor, 0)
        self.memory: Memory = device.handles.borrow(handle, _lent_bytes(size_bytes))

    @property
    def generation(self) -> int:
        """What the page says now. The kernels' reads are over when they return, so none comes after."""
        return self._page.generation


SourceArena: TypeAlias = SharedArena | DeviceArena
RankArena: TypeAlias = MappedArena | BorrowedArena


def attach_name(layout: str, device: Device) -> str:
    """How a rank names a layout to a source: with the device that it reads on, unless that is the host."""
    return layout if device.handles is None else f"{layout}{_AT}{device.identity}"


def parse_attach_name(name: str) -> tuple[str, str]:
    """The layout that a rank named, and the identity of its device."""
    layout, _, identity = name.partition(_AT)
    return layout, identity or CPU.identity


def device_of(arenas: tuple[SourceArena, ...], otherwise: Device) -> Device:
    """The one device that arenas lie on."""
    devices = {arena.device.identity: arena.device for arena in arenas}
    if len(devices) > 1:
        raise LayoutInvalid(f"one layout on several devices: {', '.join(devices)}")
    return next(iter(devices.values()), otherwise)


def _lent_bytes(size_bytes: int) -> int:
    """At least 1: a device cannot make a handle for 0 bytes."""
    return max(1, size_bytes)
