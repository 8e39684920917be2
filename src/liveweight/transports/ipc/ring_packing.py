"""Packing: the buckets of one stream out of a source's stock, with a checksum each, digested on the way where that is asked for.

Owns the tables of a stream, bound to the segments of a ring. Which bucket goes where, and when, is the ring's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from liveweight.devices.kernels import BoundDigest, BoundFreeze
from liveweight.devices.memory import Memory
from liveweight.plan.cover import Mask
from liveweight.plan.digests import plan_digests
from liveweight.plan.freezes import COLUMNS, plan_freeze, row_bytes, split
from liveweight.plan.loops import Table
from liveweight.plan.parcels import BLOCK_BYTES, Block, cut_out, in_blocks, plan_parcels
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout, Placement, packed
from liveweight.spec.region import count
from liveweight.transports.stock import Stock

Bytes: TypeAlias = npt.NDArray[np.uint8]
_TARGET_MEMORY, _SLOT = COLUMNS.index("target_memory"), COLUMNS.index("slot")
_TARGET_OFFSET, _TARGET_STRIDE = COLUMNS.index("target_offset"), COLUMNS.index("target_row_stride_bytes")


class Packing:
    """One stream of one stock. Used by one thread at a time; `lanes` are the digests of the parcels that are `packed`."""

    def __init__(self, stock: Stock, stream: Layout, segments: Sequence[Memory]) -> None:
        """LayoutInvalid for parcels that the stock does not have."""
        self.stream, self._stock, self.segments = stream, stock, tuple(segments)
        self._bytes = [segment.bytes() for segment in segments]
        self.lanes: Lanes = np.zeros((len(stream.placements), SEEDS), dtype=np.uint32)
        self.packed: Mask = np.zeros(len(stream.placements), dtype=np.bool_)
        self._ends = np.searchsorted(
            [parcel.memory for parcel in stream.placements], np.arange(1, len(stream.memories_bytes) + 1)
        )
        self._slots = int(np.diff([0, *self._ends]).max(initial=1))
        self._rows, self._blocks = self._kernel_rows()
        self._bound: list[BoundFreeze | None] = [None] * len(segments)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self.stream.memories_bytes)

    def begin(self) -> None:
        """A new round: nothing is packed of it yet."""
        self.packed[:] = False

    def pack(self, bucket: int, segment: int) -> tuple[int, int]:
        """Fill that segment; how many bytes it holds then, and their checksum."""
        start, end = _range(self._ends, bucket)
        self.lanes[start:end] = 0
        size, content = self.stream.memories_bytes[bucket], self._bytes[segment]
        checksum, summed = xxhash.xxh3_64(), 0
        for first, last, until in self._blocks[bucket]:
            self._move(segment, first, last, start, end)
            if not self._stock.foreign:  # block by block, while it is in the caches
                checksum.update(content[summed:until].data)
                summed = until
        for number in range(start, end) if self._stock.foreign else ():
            self._put(number, segment)
        checksum.update(content[summed:size].data)
        self.packed[start:end] = True
        return size, checksum.intdigest()

    def _move(self, segment: int, first: int, last: int, start: int, end: int) -> None:
        bound = self._bound[segment] or self._bind(segment)
        if self._stock.digest:
            self.lanes[start:end] += bound.run(first, last)[: end - start]
        else:
            bound.move(first, last)

    def first_tensor(self, bucket: int) -> str:
        """What a damaged bucket is called by."""
        return self.stream.placements[_range(self._ends, bucket)[0]].name

    def _kernel_rows(self) -> tuple[Table, list[list[Block]]]:
        """The freeze table of all parcels that kernels pack, and each bucket's rows in blocks. Slots count within a bucket."""
        numbers = np.array(
            [n for n, p in enumerate(self.stream.placements) if p.name not in self._stock.foreign],
            dtype=np.int64,
        )
        parcels = tuple(self.stream.placements[number] for number in numbers)
        offered = Layout(
            tensors=self.stream.tensors, memories_bytes=self.stream.memories_bytes, placements=parcels
        )
        rows = split(plan_freeze(cut_out(self._stock.held, offered), offered).rows, BLOCK_BYTES).copy()
        starts = np.array([0, *self._ends], dtype=np.int64)
        rows[:, _SLOT] = numbers[rows[:, _SLOT]] - starts[rows[:, _TARGET_MEMORY]]
        first = np.searchsorted(rows[:, _TARGET_MEMORY], np.arange(self.buckets))
        ends = rows[:, _TARGET_OFFSET] + (rows[:, 4] - 1) * rows[:, _TARGET_STRIDE] + rows[:, 8] * rows[:, 10]
        blocks = in_blocks(first, ends, row_bytes(rows))
        rows[:, _TARGET_MEMORY] = 0  # whichever segment it is bound to
        return rows, blocks

    def _bind(self, segment: int) -> BoundFreeze:
        stock = self._stock
        bound = stock.kernels.bind_freeze(
            self._rows, stock.memories, [self.segments[segment]], self._slots, warm=True
        )
        self._bound[segment] = bound
        return bound

    def _put(self, number: int, segment: int) -> None:
        """A parcel that no kernel can read: its owner writes it, and it is digested where it lies then."""
        parcel, memory = self.stream.placements[number], self.segments[segment]
        put = self._stock.foreign.get(parcel.name)
        if put is None:
            return
        put(parcel, memory)
        if self._stock.digest:
            reading = _reading(self._stock, self.stream, parcel, memory)
            self.lanes[number] = reading.run(0, len(reading.rows))[0]


def digests_of(stock: Stock, packings: Sequence[Packing], masks: Sequence[Mask], scratch_bytes: int) -> Lanes:
    """The digests of the offered tensors: from the parcels that were packed, where they make up a tensor; else it is read once more."""
    numbers = {spec.name: number for number, spec in enumerate(stock.offered.tensors)}
    totals = np.zeros((len(numbers), SEEDS), dtype=np.uint32)
    counted = np.zeros(len(numbers), dtype=np.int64)
    for packing, mask in zip(packings, masks, strict=True):
        chosen = np.flatnonzero(mask & packing.packed)
        parcels = [packing.stream.placements[number] for number in chosen]
        tensors = [numbers[parcel.name] for parcel in parcels]
        np.add.at(totals, tensors, packing.lanes[chosen])
        np.add.at(counted, tensors, [count(parcel.region) for parcel in parcels])
    missing = [
        spec for spec, found in zip(stock.offered.tensors, counted, strict=True) if found != spec.elements
    ]
    if missing:
        totals[[numbers[spec.name] for spec in missing]] = 0
        target = packed(missing)
        stream = plan_parcels(stock.offered, target, scratch_bytes).stream
        scratch = Memory.from_array(np.empty(scratch_bytes, dtype=np.uint8))
        reading = Packing(stock, stream, [scratch])
        for bucket in range(reading.buckets):
            reading.pack(bucket, 0)
        np.add.at(totals, [numbers[parcel.name] for parcel in stream.placements], reading.lanes)
    return totals


def _reading(stock: Stock, stream: Layout, parcel: Placement, memory: Memory) -> BoundDigest:
    alone = Layout(
        tensors=(stream.specs()[parcel.name],),
        memories_bytes=stream.memories_bytes,
        placements=(parcel,),
    )
    rows = plan_digests(alone).rows.copy()
    rows[:, 0] = 0
    return stock.kernels.bind_digest(rows, [memory], 1)


def _range(ends: Table, number: int) -> tuple[int, int]:
    return int(ends[number - 1]) if number else 0, int(ends[number])
