"""Host memory: faulted in when it is allocated, kept by every view of it, refused with our errors."""

from __future__ import annotations

import ctypes
import errno
import resource
from pathlib import Path

import pytest
import torch

from liveweight.devices import cpu
from liveweight.devices.cpu import PAGE_BYTES, allocate
from liveweight.devices.memory import Memory
from liveweight.errors import OutOfMemory, WrongState

SIZE = 8 << 20
TOO_MUCH = 1 << 50


def is_mapped(address: int) -> bool:
    """Whether this process has a page there."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    return any(start <= address < end for start, end in spans)


def faults() -> int:
    """How often this process has waited for a page."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Kernel:
    """A madvise that fails with one error."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, *_: int) -> int:
        ctypes.set_errno(self._number)
        return -1


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, SIZE + 3])
def test_an_allocation_is_zeros_page_aligned_and_of_the_size_asked_for(size: int) -> None:
    with allocate(size) as allocation:
        memory = allocation.memory
        assert (memory.size_bytes, memory.writable) == (size, True)
        assert memory.address % PAGE_BYTES == 0
        view = memory.bytes()
        assert len(view) == size
        assert view.ctypes.data == memory.address or size == 0
        assert not view.any()


def test_writing_to_a_new_allocation_waits_for_no_page() -> None:
    with allocate(SIZE) as allocation:
        view = allocation.memory.bytes()
        before = faults()
        view[:] = 7
        assert faults() - before < SIZE // PAGE_BYTES // 10


def test_closing_gives_the_pages_back_at_once() -> None:
    allocation = allocate(SIZE)
    address = allocation.memory.address
    assert is_mapped(address)
    allocation.close()
    allocation.close()
    assert not is_mapped(address)
    with pytest.raises(WrongState):
        _ = allocation.memory


def held_as(holder: str, memory: Memory) -> object:
    """Something that holds a memory, and nothing else that does."""
    array = memory.bytes()
    match holder:
        case "memory":
            return memory
        case "array":
            return array
        case "slice":
            return array[5:9][1:]
        case "tensor from array":
            return torch.from_numpy(array)[17:]
        case _:
            return torch.frombuffer(memory.owner, dtype=torch.uint8)[17:]


@pytest.mark.parametrize("holder", ["memory", "array", "slice", "tensor from array", "tensor from buffer"])
def test_whoever_holds_a_view_holds_the_pages(holder: str) -> None:
    allocation = allocate(SIZE)
    address = allocation.memory.address
    held = held_as(holder, allocation.memory)
    allocation.close()
    assert is_mapped(address)
    if isinstance(held, torch.Tensor):
        held.fill_(3)  # would end the process if the pages were gone
    del held
    assert not is_mapped(address)


def test_more_than_the_machine_has_is_refused_with_its_size() -> None:
    with pytest.raises(OutOfMemory, match=str(TOO_MUCH)):
        allocate(TOO_MUCH)


def test_more_than_the_address_space_is_refused_where_the_machine_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "_MEMINFO", tmp_path / "absent")
    for size in (TOO_MUCH, 1 << 62, 1 << 70):
        with pytest.raises(OutOfMemory, match=str(size)):
            allocate(size)


@pytest.mark.parametrize("text", ["MemTotal: 5 kB\n", "MemTotal: 5 kB\nMemAvailable: 1048576 kB\n"])
def test_what_the_machine_has_left_is_what_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "meminfo").write_text(text, encoding="ascii")
    monkeypatch.setattr(cpu, "_MEMINFO", tmp_path / "meminfo")
    cpu.check_available("a test", 1 << 30)
    if "Available" in text:
        with pytest.raises(OutOfMemory, match="1073741824 left"):
            cpu.check_available("a test", (1 << 30) + 1)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_pages_that_the_kernel_will_not_give_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked: list[int] = []

    def refuse(address: int, *_: int) -> int:
        asked.append(address)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(cpu, "_madvise", refuse)
    with pytest.raises(OutOfMemory, match=f"{SIZE} bytes") as caught:
        allocate(SIZE)
    assert not is_mapped(asked[0])
    assert isinstance(caught.value.__cause__, OSError)


def test_a_kernel_that_cannot_populate_is_helped_by_touching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_madvise", Kernel(errno.EINVAL))
    with allocate(SIZE + 1) as allocation:
        view = allocation.memory.bytes()
        assert not view.any()
        before = faults()
        view[:] = 7
        assert faults() - before < SIZE // PAGE_BYTES // 10
        cpu.populate(allocation.memory.address, SIZE + 1, writable=False)
        assert (view == 7).all()
