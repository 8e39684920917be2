"""Host memory for shadows: anonymous, page aligned, faulted in when it is allocated.

Owns the pages of an allocation, and how pages are faulted in for whoever maps memory (arenas too). The caller decides
what lies in them. Pages live as long as a `Memory`, or an array or tensor that was made from its owner, keeps them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from liveweight.devices.memory import Memory
from liveweight.errors import OutOfMemory, WrongState
from liveweight.spec.layout import ALIGNMENT_BYTES, align

if TYPE_CHECKING:
    import torch

PAGE_BYTES = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_*, Linux 5.14; Python 3.11 has no names for them
# The kernel holds the lock of the address space for one piece: no other thread's mmap or malloc waits longer than that.
_PIECE_BYTES = 16 << 20
_MEMINFO = Path("/proc/meminfo")

# Through ctypes and not mmap.madvise, which would hold the GIL for the whole of it.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class Allocation:
    """Anonymous pages of this process, writable. Whoever allocated it closes it; a Memory or a view keeps the pages."""

    def __init__(self, mapping: mmap.mmap, size_bytes: int) -> None:
        """Called by `allocate`, which hands the mapping over."""
        self._memory: Memory | None = mapped(mapping, 0, size_bytes, writable=True)

    @property
    def memory(self) -> Memory:
        """The pages. Its owner is an array of their bytes: make views of that, never of an address alone."""
        if self._memory is None:
            raise WrongState("closed", "using an allocation")
        return self._memory

    def close(self) -> None:
        """Release the pages: now, or, if a Memory or a view still holds them, when the last of those is gone."""
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def allocate(size_bytes: int, what: str = "a shadow", *, populated: bool = True) -> Allocation:
    """That many bytes of zeros, faulted in if `populated`. Raises OutOfMemory, and then leaves nothing behind."""
    if populated:
        check_available(what, size_bytes)
    try:
        mapping = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise out_of_memory(what, size_bytes, error) from error
    # Huge pages are faulted in four times as fast, and read back a little faster. A kernel without them does without.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        if populated:
            populate(address_of(mapping), len(mapping), writable=True)
    except OSError as error:
        mapping.close()
        raise out_of_memory(what, size_bytes, error) from error
    return Allocation(mapping, size_bytes)


def allocate_tensors(
    sizes_bytes: Sequence[int], what: str
) -> tuple[npt.NDArray[np.uint8], list[torch.Tensor]]:
    """Parts of one allocation, faulted in; each part is a storage of its own, so that saving one does not save all.

    The array is of all pages: every part holds it, and it is gone with the last of them.
    """
    import torch

    aligned = (align(size, ALIGNMENT_BYTES) for size in sizes_bytes)
    *offsets, total = itertools.accumulate(aligned, initial=0)
    with torch.inference_mode(False), allocate(total, what) as allocation:
        pages = allocation.memory.bytes()  # slices of it, and tensors of those, keep the pages after `close`
        parts = zip(offsets, sizes_bytes, strict=True)
        return pages, [torch.from_numpy(pages[offset : offset + size]) for offset, size in parts]


def mapped(mapping: mmap.mmap, offset_bytes: int, size_bytes: int, *, writable: bool) -> Memory:
    """A part of a mapping as a Memory that holds it: the pages are unmapped with the last of it and the views of its owner.

    So nobody calls `mapping.close()`. A view of the mapping itself would not do for torch, which keeps the object and not the buffer.
    """
    part: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, size_bytes, offset_bytes)
    address = address_of(mapping) + offset_bytes
    return Memory(address=address, size_bytes=size_bytes, writable=writable, owner=part)


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins. The number keeps nothing alive: keep the mapping, too."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def populate(address: int, size_bytes: int, *, writable: bool) -> None:
    """Fault every page in, for writing or for reading, with the GIL released. OSError where the kernel cannot."""
    advice = _POPULATE_WRITE if writable else _POPULATE_READ
    for start in range(address, address + size_bytes, _PIECE_BYTES):
        size = min(_PIECE_BYTES, address + size_bytes - start)
        if _madvise(start, size, advice) == 0:
            continue
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        _touch(start, size, writable=writable)


def give_back(memory: Memory) -> int:
    """Return the whole pages inside a private memory to the kernel. Returns how many bytes. The pages read as zeros from now on."""
    start = -(-memory.address // PAGE_BYTES) * PAGE_BYTES
    size = (memory.address + memory.size_bytes) // PAGE_BYTES * PAGE_BYTES - start
    if size <= 0:
        return 0
    if _madvise(start, size, mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return size


def _touch(address: int, size_bytes: int, *, writable: bool) -> None:
    """Fault pages in by hand, for kernels that do not know how to populate. New pages are zero and stay so."""
    whole = memoryview((ctypes.c_uint8 * size_bytes).from_address(address))
    pages = np.frombuffer(whole, np.uint8)[::PAGE_BYTES]
    if writable:
        pages[:] = 0
    else:
        pages.max(initial=0)


def check_available(what: str, size_bytes: int) -> None:
    """Refuse more than the machine has left: faulting it in would not fail, it would have some process killed."""
    left = _available_bytes()
    if left is not None and size_bytes > left:
        raise OutOfMemory(f"no memory for {what} of {size_bytes} bytes: the machine has {left} left")


def _available_bytes() -> int | None:
    """The kernel's estimate of what can be allocated without killing a process; None if it gives none."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    if "MemAvailable" not in kilobytes:
        return None
    return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))


def out_of_memory(what: str, size_bytes: int, error: Exception) -> OutOfMemory:
    """The error for memory that the system would not give."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return OutOfMemory(f"no memory for {what} of {size_bytes} bytes: {reason}")
