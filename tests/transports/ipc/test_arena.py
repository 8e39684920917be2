"""Arenas: written by one, read by others, sealed against everything else."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from liveweight.devices import cpu
from liveweight.errors import MessageInvalid, OutOfMemory, Unavailable, WrongState
from liveweight.transports.ipc import arena as arenas
from liveweight.transports.ipc.arena import (
    CLOSED,
    DATA_OFFSET_BYTES,
    SEALS,
    MappedArena,
    SharedArena,
    combined,
)
from tests.support.wire import leaving_nothing

SIZE = (1 << 20) + 5
TOO_MUCH = 1 << 50
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


@pytest.fixture
def arena() -> Iterator[SharedArena]:
    with SharedArena(SIZE) as arena:
        yield arena


def test_what_the_source_writes_is_what_a_rank_reads(arena: SharedArena) -> None:
    written = arena.memory.bytes()
    mapped = MappedArena(arena.descriptor, SIZE)
    read = mapped.memory.bytes()
    written[:] = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    assert np.array_equal(read, written)
    assert (arena.memory.writable, mapped.memory.writable) == (True, False)
    assert not read.flags.writeable


def test_the_data_begins_on_a_page_at_both_ends(arena: SharedArena) -> None:
    mapped = MappedArena(arena.descriptor, SIZE)
    assert arena.memory.address % 4096 == mapped.memory.address % 4096 == 0
    assert arena.memory.size_bytes == mapped.memory.size_bytes == SIZE


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_an_arena_may_be_small(size: int) -> None:
    with SharedArena(size) as arena:
        assert MappedArena(arena.descriptor, size).memory.size_bytes == size


def test_a_raised_generation_shows_at_the_ranks_and_leaves_the_data_alone(arena: SharedArena) -> None:
    mapped = MappedArena(arena.descriptor, SIZE)
    before = arena.generation
    assert mapped.generation == before
    assert arena.raise_generation() == before + 1
    assert (arena.generation, mapped.generation) == (before + 1, before + 1)
    assert not mapped.memory.bytes().any()


def test_the_generation_of_one_arena_is_not_that_of_another() -> None:
    with SharedArena(1) as one, SharedArena(1) as other:
        assert one.generation != other.generation


def test_several_generations_are_the_same_as_long_as_each_of_them_is() -> None:
    assert combined([3, 4]) != combined([3, 5]) != combined([4, 5])
    assert combined([3, CLOSED]) == CLOSED


def test_reading_a_mapped_arena_waits_for_no_page(arena: SharedArena) -> None:
    view = MappedArena(arena.descriptor, SIZE).memory.bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view.max()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < SIZE // 4096 // 10


def map_writable(arena: SharedArena) -> None:
    mmap.mmap(arena.descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_a_new_opening_writable(arena: SharedArena) -> None:
    descriptor = os.open(f"/proc/self/fd/{arena.descriptor}", os.O_RDWR)
    try:
        mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def make_a_mapping_writable(arena: SharedArena) -> None:
    mapped = MappedArena(arena.descriptor, SIZE)
    if _libc.mprotect(mapped.memory.address, 4096, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")


def punch_a_hole(arena: SharedArena) -> None:
    if _libc.fallocate(arena.descriptor, 0x01 | 0x02, 0, 4096):
        raise OSError(ctypes.get_errno(), "fallocate")


FORBIDDEN: dict[str, Callable[[SharedArena], object]] = {
    "map it writable": map_writable,
    "map a new opening of it writable": map_a_new_opening_writable,
    "make a mapping writable": make_a_mapping_writable,
    "write": lambda arena: os.pwrite(arena.descriptor, b"x", 0),
    "grow": lambda arena: os.ftruncate(arena.descriptor, 1 << 24),
    "shrink": lambda arena: os.ftruncate(arena.descriptor, 0),
    "punch a hole": punch_a_hole,
    "seal": lambda arena: fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}


@pytest.mark.parametrize("act", FORBIDDEN)
def test_nobody_who_has_the_descriptor_can(act: str, arena: SharedArena) -> None:
    arena.memory.bytes()[:] = 1
    with pytest.raises(OSError) as caught:
        FORBIDDEN[act](arena)
    assert caught.value.errno in (errno.EPERM, errno.EACCES)
    assert arena.memory.bytes().all()


def memfd(size: int, *, seals: int = 0, header: bytes = b"") -> int:
    descriptor = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, header, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


TOTAL = DATA_OFFSET_BYTES + SIZE
HEADER = struct.pack("<8sQQQ", b"LWARENA\0", 1, SIZE, 4)
IMPOSTORS: dict[str, tuple[Callable[[], int], str]] = {
    "a pipe": (lambda: os.dup(0), "no arena"),
    "unsealed": (lambda: memfd(TOTAL, header=HEADER), "not sealed"),
    "could shrink": (lambda: memfd(TOTAL, header=HEADER, seals=SEALS & ~fcntl.F_SEAL_SHRINK), "not sealed"),
    "could be written": (lambda: memfd(TOTAL, header=HEADER, seals=SEALS & ~0x10), "not sealed"),
    "too short": (lambda: memfd(TOTAL - 1, header=HEADER, seals=SEALS), "bytes"),
    "too long": (lambda: memfd(TOTAL + 1, header=HEADER, seals=SEALS), "bytes"),
    "without a header": (lambda: memfd(TOTAL, seals=SEALS), "no arena"),
    "of another format": (
        lambda: memfd(TOTAL, header=struct.pack("<8sQQQ", b"LWARENA\0", 2, SIZE, 4), seals=SEALS),
        "format 2",
    ),
    "of another size inside": (
        lambda: memfd(TOTAL, header=struct.pack("<8sQQQ", b"LWARENA\0", 1, SIZE + 1, 4), seals=SEALS),
        "no arena",
    ),
}


@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_a_rank_maps_nothing_but_a_sealed_arena_of_the_right_size(impostor: str) -> None:
    make, words = IMPOSTORS[impostor]
    with leaving_nothing():
        descriptor = make()
        try:
            with pytest.raises(MessageInvalid, match=words):
                MappedArena(descriptor, SIZE)
        finally:
            os.close(descriptor)


def test_an_honest_arena_made_by_hand_is_mapped() -> None:
    descriptor = memfd(TOTAL, header=HEADER, seals=SEALS)
    assert MappedArena(descriptor, SIZE).generation == 4
    os.close(descriptor)


def test_closing_leaves_nothing_and_says_so() -> None:
    with leaving_nothing():
        arena = SharedArena(SIZE)
        arena.close()
        arena.close()
        for use in (lambda: arena.memory, lambda: arena.generation, arena.raise_generation):
            with pytest.raises(WrongState, match="closed"):
                use()


def test_what_is_viewed_or_mapped_outlives_the_arena() -> None:
    with leaving_nothing():
        with SharedArena(SIZE) as arena:
            view, mapped = arena.memory.bytes(), MappedArena(arena.descriptor, SIZE)
        view[:] = 9
        assert (mapped.memory.bytes() == 9).all()
        assert mapped.generation == CLOSED
        del view, mapped, arena


def test_an_arena_larger_than_the_machine_is_refused_with_its_size() -> None:
    with leaving_nothing(), pytest.raises(OutOfMemory, match=str(TOO_MUCH)):
        SharedArena(TOO_MUCH)


@pytest.mark.parametrize(
    ("step", "number", "expected"),
    [
        ("memfd_create", errno.ENOMEM, OutOfMemory),
        ("memfd_create", errno.ENOSYS, Unavailable),
        ("ftruncate", errno.ENOSPC, OutOfMemory),
        ("ftruncate", errno.EFBIG, OutOfMemory),
        ("populate", errno.ENOMEM, OutOfMemory),
        ("populate", errno.EFAULT, OutOfMemory),
        ("fcntl", errno.EINVAL, Unavailable),
    ],
)
def test_an_allocation_that_fails_at_any_step_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str, number: int, expected: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    where = {"populate": arenas, "fcntl": fcntl}.get(step, os)
    with leaving_nothing():
        monkeypatch.setattr(where, step, fail)
        with pytest.raises(expected) as caught:
            SharedArena(SIZE)
        monkeypatch.undo()
        assert type(caught.value) is expected
        assert (str(SIZE) in str(caught.value)) == (expected is OutOfMemory)


def test_a_mapping_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, arena: SharedArena) -> None:
    before = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:liveweight")

    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(cpu, "_madvise", refuse)
    with leaving_nothing(), pytest.raises(OutOfMemory, match=str(SIZE)):
        MappedArena(arena.descriptor, SIZE)
    assert Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:liveweight") == before
