"""The kernels in plain torch, on any device: for memory that the host's kernels cannot reach. The same tables, the same bits, slower.

Rows become strided views of a memory's bytes; digests are in torch_digest.py. A run is over when it returns, on other devices, too.
The memory is allocated elsewhere. Importing this module needs torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from liveweight.devices.bounds import Memories, Table, bound_copy, bound_digest, bound_freeze
from liveweight.devices.memory import Memory
from liveweight.devices.torch_casts import bfloat16_bits, float16_bits
from liveweight.devices.torch_digest import digest_tensor
from liveweight.errors import LayoutInvalid
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Span

Bases: TypeAlias = tuple[torch.Tensor, ...]
"""The storages' bytes in which memories lie, as many as memories, in their order."""

SideStream: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Where a run queues its work; at the end of the context the work is done."""

_BLOCK_ITEMS = 1 << 20
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {1: DType.UINT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}
_BFLOAT16 = 1


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage as a uint8 tensor that holds it, wherever it lies."""
    with torch.inference_mode(False):  # a tensor made in that mode could not be written outside of it
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage)


def device_memory(tensor: torch.Tensor, *, writable: bool = True) -> Memory:
    """The whole storage of a tensor on any device. Offsets count from the storage's first byte, as in `Memory.from_tensor`.

    What another process lent is not `writable`: no table that writes it can be bound.
    """
    owner = storage_bytes(tensor.untyped_storage())
    return Memory(address=owner.data_ptr(), size_bytes=owner.numel(), writable=writable, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCopy:
    """A bound copy table. `keep` holds the memories."""

    rows: Table
    keep: tuple[Memory, ...]
    side_stream: SideStream
    sources: Bases
    targets: Bases

    def run(self, first: int, last: int) -> None:
        """Execute rows [first, last)."""
        with self.side_stream():
            for row in _range(self.rows, first, last):
                source, address, target, to, outer, out_s, out_t, inner, in_s, in_t, chunk = row
                if outer and inner and chunk:
                    loops = [(outer, out_s, out_t), (inner, in_s, in_t)]
                    _copy(self.sources[source], address, self.targets[target], to, loops, chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDigest:
    """A bound digest table."""

    rows: Table
    keep: tuple[Memory, ...]
    side_stream: SideStream
    memories: Bases
    slots: int

    def run(self, first: int, last: int) -> Lanes:
        """The partial digests of rows [first, last)."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        with self.side_stream():
            for row in _range(self.rows, first, last):
                if row[4] and row[8]:
                    lanes[row[11]] += _digest(self.memories[row[0]], row)
        return lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFreeze:
    """A bound freeze table."""

    rows: Table
    keep: tuple[Memory, ...]
    side_stream: SideStream
    sources: Bases
    targets: Bases
    slots: int

    def run(self, first: int, last: int) -> Lanes:
        """Move rows [first, last); their partial digests."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        with self.side_stream():
            for row in _range(self.rows, first, last):
                if row[4] and row[8]:
                    source, target = self.sources[row[0]], self.targets[row[12]]
                    _move(source, target, row)
                    item, to, stride = row[10], row[13], row[14]
                    lanes[row[11]] += _digest(target, [0, to, *row[2:5], stride, *row[6:9], item, item])
        return lanes

    def move(self, first: int, last: int) -> None:
        """Move rows [first, last) without a digest."""
        with self.side_stream():
            for row in _range(self.rows, first, last):
                if row[4] and row[8]:
                    _move(self.sources[row[0]], self.targets[row[12]], row)


class TorchKernels:
    """Writes and digests memory of one device, named with its index. What is copied from may lie on the host or another device.

    Work is queued on the stream that is current for the calling thread, or on `side_stream`, and waited for.
    """

    def __init__(self, device: str | torch.device, side_stream: SideStream | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")
        elif self.device.index is None:
            raise ValueError(f"device {self.device} has no index: name one, as in {self.device}:0")
        self._side_stream = (lambda: _here(self.device)) if side_stream is None else side_stream

    def bind_copy(self, rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> TorchCopy:
        """A copy table, checked."""
        return TorchCopy(
            rows=bound_copy(rows, sources, targets),
            keep=(*sources, *targets),
            side_stream=self._side_stream,
            sources=tuple(map(_base, sources)),
            targets=self._own(targets),
        )

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> TorchDigest:
        """A digest table, checked."""
        table = bound_digest(rows, memories, slots)
        return TorchDigest(
            rows=table,
            keep=tuple(memories),
            side_stream=self._side_stream,
            memories=self._own(memories),
            slots=slots,
        )

    def bind_freeze(self, rows: Table, sources: Memories, targets: Memories, slots: int) -> TorchFreeze:
        """A freeze table, checked."""
        return TorchFreeze(
            rows=bound_freeze(rows, sources, targets, slots),
            keep=(*sources, *targets),
            side_stream=self._side_stream,
            sources=tuple(map(_base, sources)),
            targets=self._own(targets),
            slots=slots,
        )

    def _own(self, memories: Sequence[Memory]) -> Bases:
        """The bytes of memories that must lie on this device."""
        bases = tuple(map(_base, memories))
        for number, base in enumerate(bases):
            if base.device != self.device:
                raise LayoutInvalid(
                    f"memory {number} lies on {base.device}, these kernels work on {self.device}"
                )
        return bases


def _base(memory: Memory) -> torch.Tensor:
    """All bytes of the storage that a memory lies in. What no tensor owns is the host's, and a storage of its own."""
    owner = memory.owner
    device = owner.device if isinstance(owner, torch.Tensor) else torch.device("cpu")
    if memory.size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if isinstance(owner, torch.Tensor):
        base = storage_bytes(owner.untyped_storage())
        start = memory.address - base.data_ptr()
        if 0 <= start <= base.numel() - memory.size_bytes:
            return base
        if device.type != "cpu":
            raise LayoutInvalid(f"memory on {device} that does not lie in its owner's storage")
    raw = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    return torch.frombuffer(raw, dtype=torch.uint8)


def _range(table: Table, first: int, last: int) -> list[list[int]]:
    if not 0 <= first <= last <= len(table):
        raise ValueError(f"rows {first} to {last} of a table of {len(table)}")
    rows: list[list[int]] = table[first:last].tolist()
    return rows


@contextmanager
def _here(device: torch.device) -> Iterator[None]:
    """Queue on the calling thread's current stream, and wait for it; nobody touches the memory after the end."""
    try:
        yield
    finally:
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def _width(item: int, addresses: Sequence[int], loops: Sequence[tuple[int, ...]]) -> int:
    """The widest integer, in bytes, of which items, addresses and strides are all multiples."""
    strides = (stride for count, *strides in loops if count > 1 for stride in strides)
    return math.gcd(8, item, *addresses, *strides)


def _view(
    base: torch.Tensor, address: int, loops: Sequence[tuple[int, int]], item: int, width: int
) -> torch.Tensor:
    """Items at an address as integers of `width` bytes: one dimension per loop, and one for the integers of an item."""
    integers = base[: base.numel() // width * width].view(_TYPES[width])
    shape = [*(count for count, _ in loops), item // width]
    strides = [*(stride // width for _, stride in loops), 1]
    return integers.as_strided(shape, strides, (address - base.data_ptr()) // width)


def _copy(
    source: torch.Tensor,
    address: int,
    target: torch.Tensor,
    to: int,
    loops: Sequence[tuple[int, int, int]],
    item: int,
) -> None:
    width = _width(item, (source.data_ptr(), address, target.data_ptr(), to), loops)
    read = _view(source, address, [(count, stride) for count, stride, _ in loops], item, width)
    _view(target, to, [(count, stride) for count, _, stride in loops], item, width).copy_(read)


def _matrix(
    base: torch.Tensor, address: int, shape: tuple[int, int], strides: tuple[int, int], item: int
) -> torch.Tensor:
    """Items as a matrix of integers of their size; a copy only where their alignment asks for one."""
    loops = list(zip(shape, strides, strict=True))
    width = _width(item, (base.data_ptr(), address), loops)
    read = _view(base, address, loops, item, width)
    whole = read if width == item else read.clone(memory_format=torch.contiguous_format).view(_TYPES[item])
    return whole[:, :, 0]


def _blocks(rows: int, columns: int, row_step: int, step: int) -> Iterator[tuple[int, int, int, int]]:
    """(top, height, left, width) of blocks that fit in memory as copies. What does not advance is cut into single lines."""
    width = min(columns, _BLOCK_ITEMS) if step else 1
    height = max(1, _BLOCK_ITEMS // width) if row_step else 1
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield top, min(height, rows - top), left, min(width, columns - left)


def _digest(base: torch.Tensor, row: Sequence[int]) -> Lanes:
    """The digest of one rectangle: of a region of the smallest tensor that has one there."""
    _, address, row_first, row_step, rows, row_stride, first, step, columns, stride, item = row[:11]
    total = np.zeros(SEEDS, dtype=np.uint32)
    for top, height, left, width in _blocks(rows, columns, row_step, step):
        start = address + top * row_stride + left * stride
        matrix = _matrix(base, start, (height, width), (row_stride, stride), item)
        region = (
            Span(row_first + top * row_step, height, max(1, row_step)),
            Span(first + left * step, width, max(1, step)),
        )
        shape = tuple(span.last + 1 for span in region)
        total += digest_tensor(matrix, region, TensorSpec(name="rectangle", dtype=_DTYPES[item], shape=shape))
    return total


def _move(source: torch.Tensor, target: torch.Tensor, row: Sequence[int]) -> None:
    """Copy or cast one rectangle."""
    _, address, _, _, rows, row_stride, _, _, columns, stride, item, _, _, to, to_stride, cast = row
    if not cast:
        loops = [(rows, row_stride, to_stride), (columns, stride, item)]
        _copy(source, address, target, to, loops, item)
        return
    for top, height, left, width in _blocks(rows, columns, 1, 1):
        start = address + top * row_stride + left * stride
        bits = _matrix(source, start, (height, width), (row_stride, stride), 4).to(target.device)
        halves = (bfloat16_bits(bits) if cast == _BFLOAT16 else float16_bits(bits)).contiguous()
        written = [(height, to_stride), (width, item)]
        place = to + top * to_stride + left * item
        unit = _width(item, (target.data_ptr(), place), written)
        into = _view(target, place, written, item, unit)
        into.copy_(halves.view(_TYPES[unit]).view(into.shape))
