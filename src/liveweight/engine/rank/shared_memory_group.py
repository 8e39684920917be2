"""A group of ranks through memory that all of them map: for ranks of one host, on the CPU.

The same sums as over gloo, computed in rank order by every rank, so that all hold the same bits; a call costs what copying and waking cost,
and no trip through sockets. The ranks find each other over gloo, which also carries what does not fit here.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Protocol

from liveweight.errors import ChannelClosed

if TYPE_CHECKING:
    import torch

    from liveweight.engine.models.forward import Group

HEADER_BYTES = 4096
SLOT_BYTES = 8 << 20


class SegmentUnshared(Exception):
    """A rank could not map the others' memory: a hardened /proc, another namespace."""


class RendezvousStore(Protocol):
    """The key-value store through which ranks exchange paths at the start."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""


class SharedGroup:
    """One rank's end. `others` is the group for what does not fit: larger parts, other dtypes."""

    def __init__(self, others: Group, store: RendezvousStore, *, timeout_s: float) -> None:
        from liveweight.engine import _shared

        self._native, self._others, self._timeout_s = _shared, others, timeout_s
        self.rank, self.size = others.rank, others.size
        self._segment = _segment(store, rank=self.rank, size=self.size)
        self._turn = 0

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all parts, in the argument's memory."""
        import torch

        if not self._fits(part) or not part.is_contiguous():
            return self._others.add(part)
        half = part.dtype == torch.bfloat16
        raw = (part.view(torch.int16) if half else part).numpy()
        self._turn += 1
        self._check_all_arrived(
            self._native.add(
                self._segment, SLOT_BYTES, self.rank, self.size, self._turn, raw, half, self._timeout_s
            )
        )
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All parts side by side along the last dimension."""
        import torch

        part = part.contiguous()
        if not self._fits(part):
            return self._others.join(part)
        joined = part.new_empty((*part.shape[:-1], part.shape[-1] * self.size))
        row = part.shape[-1] * part.element_size()
        raw, into = (tensor.view(torch.uint8).numpy() for tensor in (part, joined))
        self._turn += 1
        self._check_all_arrived(
            self._native.join(
                self._segment, SLOT_BYTES, self.rank, self.size, self._turn, raw, into, row, self._timeout_s
            )
        )
        return joined

    def _fits(self, part: torch.Tensor) -> bool:
        """The same on every rank: it depends on shape and dtype only."""
        import torch

        known = part.dtype in (torch.float32, torch.bfloat16)
        return known and 0 < part.numel() * part.element_size() <= SLOT_BYTES

    def _check_all_arrived(self, missing: int | None) -> None:
        if missing is not None:
            raise ChannelClosed(f"rank {missing} did not come within {self._timeout_s:.0f} s")


def _segment(store: RendezvousStore, *, rank: int, size: int) -> mmap.mmap:
    """Rank 0's memory, mapped by all; it has no name, and is gone when the last rank is. SegmentUnshared, on every rank, where
    one could not map it."""
    bytes_needed = HEADER_BYTES + 2 * size * SLOT_BYTES
    descriptor, segment = -1, None
    try:
        if rank == 0:
            descriptor = os.memfd_create("liveweight-group", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, bytes_needed)
            store.set("segment", f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = os.open(store.get("segment").decode(), os.O_RDWR | os.O_CLOEXEC)
        segment = mmap.mmap(descriptor, bytes_needed)
    except OSError:
        if rank == 0:
            store.set("segment", "none")
    store.set(f"mapped/{rank}", "no" if segment is None else "yes")
    mapped = [
        store.get(f"mapped/{other}") == b"yes" for other in range(size)
    ]  # rank 0's descriptor stays until then
    if descriptor >= 0:
        os.close(descriptor)
    if segment is None or not all(mapped):
        raise SegmentUnshared
    return segment
