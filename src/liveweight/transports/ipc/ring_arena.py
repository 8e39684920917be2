"""What ring offers are made of: a page of shared memory with the generation, beside memory that only the source reads.

The page is an arena without data (arena.py), whose generation is raised before the memory changes. Ranks map the page and the ring, never
the memory itself.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from liveweight.devices.cpu import Allocation, allocate
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.errors import WrongState
from liveweight.spec.digest import Lanes
from liveweight.transports.ipc.arena import SharedArena


class RingArena:
    """Memory that a ring is packed from; of no bytes where the source brings its own. Used by the publisher's driver thread."""

    device: Device = CPU

    def __init__(self, size_bytes: int) -> None:
        """Allocate it, in private memory. OutOfMemory where it cannot be had; nothing is left behind then."""
        self.size_bytes = size_bytes
        self._allocation: Allocation | None = allocate(size_bytes, "an arena")
        self._page = SharedArena(0)

    @property
    def descriptor(self) -> int:
        """The page of the generation."""
        return self._page.descriptor

    @property
    def memory(self) -> Memory:
        """The data, private."""
        if self._allocation is None:
            raise WrongState("closed", "using an arena")
        return self._allocation.memory

    @property
    def generation(self) -> int:
        """What the page says now."""
        return self._page.generation

    def raise_generation(self) -> int:
        """Revoke every reader; returns the new generation."""
        return self._page.raise_generation()

    def close(self) -> None:
        """Release the memory. Readers are revoked."""
        if self._allocation is not None:
            self._allocation.close()
            self._allocation = None
        self._page.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def segments_of(memory: Memory, segments: int, segment_bytes: int) -> list[Memory]:
    """A ring's memory in its segments."""
    return [
        dataclasses.replace(memory, address=memory.address + number * segment_bytes, size_bytes=segment_bytes)
        for number in range(segments)
    ]


def sum_of(lanes: Lanes) -> int:
    """The checksum of a bucket: of the digests of its parcels, in their order. They are taken while bytes are moved, on either side."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(lanes).tobytes())
