"""Arenas: shared memory that one process writes and others can only ever read.

Owns the memfd: its header page, its seals, the mapping at the source and the mappings at the ranks. source.py hands out the
descriptor; the trainer decides what lies in the memory.

    page 0      magic, format, size of the data, generation
    page 1...   data

The source maps it writable once, then seals it: nobody, itself included, can map it writable again, nor change its size. So a rank
that has checked the seals reads without a fault even after the source was killed. The kernel frees the memory with the last mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from liveweight.devices.cpu import address_of, check_available, mapped, out_of_memory, populate
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.errors import MessageInvalid, Unavailable, WrongState

FORMAT = 1
DATA_OFFSET_BYTES = 4096
_MAGIC = b"LWARENA\0"
_HEADER = struct.Struct("<8sQQQ")
HEADER_BYTES = _HEADER.size
_GENERATION = 3
"""Its place in the header, in words of 8 bytes: aligned, so that one store writes it and one load reads it."""
_GENERATION_BITS = 48
CLOSED = 0
"""The generation of an arena that its source has closed: whatever is read from it is invalid."""
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; Python 3.11 has no name for it
SEALS = _FUTURE_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_NO_MEMORY = {errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EAGAIN, errno.EFAULT}

Words = npt.NDArray[np.uint64]


class SharedArena:
    """The source's end: writable here and nowhere else. Used by the publisher's driver thread; `generation` may be read by any.

    The first generation is random: an offer of a source that died does not fit the arenas of its successor.
    """

    device: Device = CPU

    def __init__(self, size_bytes: int, *, populated: bool = True) -> None:
        """Allocate it, faulted in if `populated`, and sealed. OutOfMemory where it cannot be had; nothing is left behind then."""
        if populated:
            check_available("an arena", size_bytes)
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        generation = 1 + secrets.randbits(_GENERATION_BITS)
        try:
            self.descriptor, mapping = _create(size_bytes, generation, populated=populated)
        except OSError as error:
            if error.errno in _NO_MEMORY:
                raise out_of_memory("an arena", size_bytes, error) from error
            raise Unavailable(f"shared memory that can be sealed: {error.strerror}") from error
        self._header: Words | None = _header_of(mapping)
        self._memory: Memory | None = mapped(mapping, DATA_OFFSET_BYTES, size_bytes, writable=True)

    @property
    def memory(self) -> Memory:
        """The data. Its owner is an array of the bytes: whoever holds it, or a view of it, holds the mapping."""
        if self._memory is None:
            raise WrongState("closed", "using an arena")
        return self._memory

    @property
    def generation(self) -> int:
        """What the header says now."""
        return _load(self._words())

    def raise_generation(self) -> int:
        """Revoke every reader of what the arena holds now; returns the new generation. Before the bytes change, not after.

        x86 shows stores to others in the order in which they were made, but for streaming ones: those, and all stores on other
        machines, are held back by the lock, which is released and taken once more behind the header's store.
        """
        words = self._words()
        with self._lock:
            words[_GENERATION] = raised = _load(words) + 1
        with self._lock:
            return raised

    def handle(self) -> bytes:
        """Empty: ranks need only the descriptor."""
        return b""

    def close(self) -> None:
        """Close the descriptor now; the mapping ends with its last view. Readers are revoked, and unmap it in their next round."""
        if self._header is None:
            return
        self._header[_GENERATION] = CLOSED
        self._memory = self._header = None  # what held the mapping
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _words(self) -> Words:
        if self._header is None:
            raise WrongState("closed", "using an arena")
        return self._header


class MappedArena:
    """A rank's end: read-only, for good. The pages are unmapped with the last one who holds this, its memory or a view."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map an arena that should have that size, and fault it in. The descriptor stays the caller's and is not needed after.

        MessageInvalid for a descriptor of anything else: unsealed memory could change its size under a reader.
        """
        _check_descriptor(descriptor, size_bytes)
        try:
            mapping = mmap.mmap(descriptor, _total_bytes(size_bytes), mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise out_of_memory("a mapping", size_bytes, error) from error
        try:
            _check_header(mapping, size_bytes)
            populate(address_of(mapping), len(mapping), writable=False)
        except OSError as error:
            mapping.close()
            raise out_of_memory("a mapping", size_bytes, error) from error
        except BaseException:
            mapping.close()
            raise
        self._header = _header_of(mapping)
        self.memory: Memory = mapped(mapping, DATA_OFFSET_BYTES, size_bytes, writable=False)

    @property
    def generation(self) -> int:
        """What the header says now. A rank's loads of the data that came before are not reordered behind it: threads that
        read have been joined, through locks."""
        return _load(self._header)


def combined(generations: Iterable[int]) -> int:
    """The generation of several arenas at once, as offers carry it: their sum. CLOSED if one of them is.

    No generation ever falls, so the sum is the same exactly as long as each of them is.
    """
    each = tuple(generations)
    return CLOSED if CLOSED in each else sum(each)


def _create(size_bytes: int, generation: int, *, populated: bool) -> tuple[int, mmap.mmap]:
    """A sealed memfd and its one writable mapping. OSError leaves neither."""
    total = _total_bytes(size_bytes)
    descriptor = os.memfd_create("liveweight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, total)
        mapping = mmap.mmap(descriptor, total, mmap.MAP_SHARED)
        try:
            populate(address_of(mapping), total if populated else DATA_OFFSET_BYTES, writable=True)
            _HEADER.pack_into(mapping, 0, _MAGIC, FORMAT, size_bytes, generation)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            mapping.close()
            raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapping


def _check_descriptor(descriptor: int, size_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MessageInvalid("the source handed out a descriptor that is no arena") from error
    if seals & SEALS != SEALS:
        raise MessageInvalid(f"the source's arena is not sealed: {seals:#x}, expected {SEALS:#x}")
    found = os.fstat(descriptor).st_size
    if found != _total_bytes(size_bytes):
        raise MessageInvalid(
            f"the source's arena has {found} bytes, its layout needs {_total_bytes(size_bytes)}"
        )


def _check_header(mapping: mmap.mmap, size_bytes: int) -> None:
    generation_in(mapping[:HEADER_BYTES], size_bytes)


def generation_in(header: bytes, size_bytes: int) -> int:
    """What a header says that was read from elsewhere; MessageInvalid unless it is that of an arena of this size."""
    magic, number, size, generation = _HEADER.unpack(header)
    if (magic, number, size) != (_MAGIC, FORMAT, size_bytes):
        raise MessageInvalid(f"no arena of ours: magic {magic!r}, format {number}, {size} bytes")
    return int(generation)


def _total_bytes(size_bytes: int) -> int:
    return DATA_OFFSET_BYTES + size_bytes


def _header_of(mapping: mmap.mmap) -> Words:
    return np.frombuffer(mapping, np.uint64, _HEADER.size // 8)


def _load(words: Words) -> int:
    return int(words[_GENERATION])
