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
from liveweight.plan.parcels import cut_out, plan_parcels
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout, Placement, packed
from liveweight.spec.region import count
from liveweight.transports.stock import Stock

Bytes: TypeAlias = npt.NDArray[np.uint8]
_AT = {name: column for column, name in enumerate(COLUMNS)}
_TARGET_MEMORY, _SLOT = _AT["target_memory"], _AT["slot"]
PIECE_BYTES = 192 << 10
"""What is packed at a time: less than what the kernels write past the caches, so that the checksum, and the rank, read it from there."""


def bucket_sum(content: Bytes) -> int:
    """The checksum that a bucket carries."""
    return xxhash.xxh3_64_intdigest(content.data)


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
        self._by_kernel = np.array([p.name not in stock.foreign for p in stream.placements], dtype=np.bool_)
        self._slots = int(np.diff([0, *self._ends]).max(initial=1))
        self._rows = self._kernel_rows()
        self._cut()
        self._bound: list[BoundFreeze | None] = [None] * len(segments)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self.stream.memories_bytes)

    def begin(self) -> None:
        """A new round: nothing is packed of it yet."""
        self.packed[:] = False

    def pack(self, bucket: int, segment: int) -> tuple[int, int]:
        """Fill that segment; how many bytes it holds then, and their checksum.

        Piece by piece, each summed while it is still in the processor's nearest cache.
        """
        start, end = _range(self._ends, bucket)
        lanes = np.zeros((self._slots, SEEDS), dtype=np.uint32)
        for number in range(start, end) if self._stock.foreign else ():
            self._put(number, segment)
        content, done, checksum = self._bytes[segment].data, 0, xxhash.xxh3_64()
        bound = self._bound[segment] or self._bind(segment)
        for piece in range(*_range(self._piece_ends, bucket)):
            first, last = _range(self._row_ends, piece)
            if self._stock.digest:
                lanes += bound.run(first, last)
            else:
                bound.move(first, last)
            reached = int(self._reached[piece])
            checksum.update(content[done:reached])
            done = reached
        size = self.stream.memories_bytes[bucket]
        checksum.update(content[done:size])
        mine = self._by_kernel[start:end]
        self.lanes[start:end][mine] = lanes[: end - start][mine]
        self.packed[start:end] = True
        return size, checksum.intdigest()

    def first_tensor(self, bucket: int) -> str:
        """What a damaged bucket is called by."""
        return self.stream.placements[_range(self._ends, bucket)[0]].name

    def _kernel_rows(self) -> Table:
        """The freeze table of all parcels that kernels pack, bucket by bucket; a slot is a parcel's number in its bucket."""
        numbers = np.flatnonzero(self._by_kernel)
        parcels = tuple(self.stream.placements[number] for number in numbers)
        offered = Layout(
            tensors=self.stream.tensors, memories_bytes=self.stream.memories_bytes, placements=parcels
        )
        rows = plan_freeze(cut_out(self._stock.held, offered), offered).rows
        rows = split(rows, PIECE_BYTES // 2).copy()
        starts = np.array([0, *self._ends], dtype=np.int64)
        rows[:, _SLOT] = numbers[rows[:, _SLOT]] - starts[rows[:, _TARGET_MEMORY]]
        return rows

    def _cut(self) -> None:
        """Cut the rows into pieces, none across buckets: where each ends, in rows and in bytes of its bucket."""
        buckets, sizes = self._rows[:, _TARGET_MEMORY].copy(), row_bytes(self._rows)
        before = np.cumsum(sizes) - sizes
        turns = np.stack([buckets, before // PIECE_BYTES], axis=1)
        ends = np.flatnonzero((turns[1:] != turns[:-1]).any(axis=1)) + 1
        self._row_ends = np.array([*ends, len(turns)] if len(turns) else [], dtype=np.int64)
        last = self._rows[self._row_ends - 1]
        lines, width = last[:, _AT["rows"]] - 1, last[:, _AT["columns"]] * last[:, _AT["item_bytes"]]
        self._reached = (
            last[:, _AT["target_offset"]] + lines * last[:, _AT["target_row_stride_bytes"]] + width
        )
        self._piece_ends = np.searchsorted(buckets[self._row_ends - 1], np.arange(1, self.buckets + 1))
        self._rows[:, _TARGET_MEMORY] = 0  # whichever segment it is bound to

    def _bind(self, segment: int) -> BoundFreeze:
        stock = self._stock
        bound = stock.kernels.bind_freeze(self._rows, stock.memories, [self.segments[segment]], self._slots)
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
