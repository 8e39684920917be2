"""Packing: fills the buckets of one stream from a packing source and digests them on the way; a bucket's checksum is over its digests.

Owns the tables of a stream, bound to the segments of a ring. The ring (ring_source.py) decides which bucket is packed when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from liveweight.devices.kernels import BoundDigest, BoundFreeze
from liveweight.devices.memory import Memory
from liveweight.plan.digests import plan_digests
from liveweight.plan.freezes import COLUMNS, plan_freeze
from liveweight.plan.parcel_covers import Mask
from liveweight.plan.parcels import cut_out, plan_parcels
from liveweight.plan.unpacking import InBuckets
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout, Placement, packed
from liveweight.spec.region import count
from liveweight.spec.row_table import Table
from liveweight.transports.ipc.ring_arena import sum_of
from liveweight.transports.packing_source import PackingSource

_TARGET_MEMORY, _SLOT = COLUMNS.index("target_memory"), COLUMNS.index("slot")


class BucketPacking:
    """One stream of one packing source. Used by one thread at a time; `lanes` are the digests of the parcels that are `packed`."""

    def __init__(self, packing_source: PackingSource, stream: Layout, segments: Sequence[Memory]) -> None:
        """Raises LayoutInvalid for parcels that the packing source does not have."""
        self.stream, self._packing_source, self.segments = stream, packing_source, tuple(segments)
        self.lanes: Lanes = np.zeros((len(stream.placements), SEEDS), dtype=np.uint32)
        self.packed: Mask = np.zeros(len(stream.placements), dtype=np.bool_)
        self._ends = np.searchsorted(
            [parcel.memory for parcel in stream.placements], np.arange(1, len(stream.memories_bytes) + 1)
        )
        self._slots = int(np.diff([0, *self._ends]).max(initial=1))
        self._table = self._kernel_rows()
        self._bound: list[BoundFreeze | None] = [None] * len(segments)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return len(self.stream.memories_bytes)

    def begin(self) -> None:
        """A new round: nothing is packed of it yet."""
        self.packed[:] = False

    def pack(self, bucket: int, segment: int) -> tuple[int, int]:
        """Fill that segment; how many bytes it holds then, and the checksum of what was written."""
        start, end = _range(self._ends, bucket)
        bound = self._bound[segment] or self._bind(segment)
        self.lanes[start:end] = bound.run(*self._table.range_of(bucket))[: end - start]
        for number in range(start, end) if self._packing_source.foreign else ():
            self._put(number, segment)
        self.packed[start:end] = True
        return self.stream.memories_bytes[bucket], sum_of(self.lanes[start:end])

    def first_tensor(self, bucket: int) -> str:
        """The tensor that errors about a damaged bucket name."""
        return self.stream.placements[_range(self._ends, bucket)[0]].name

    def _kernel_rows(self) -> InBuckets:
        """The freeze table of all parcels that kernels pack. Slots count within a bucket."""
        numbers = np.array(
            [n for n, p in enumerate(self.stream.placements) if p.name not in self._packing_source.foreign],
            dtype=np.int64,
        )
        parcels = tuple(self.stream.placements[number] for number in numbers)
        offered = Layout(
            tensors=self.stream.tensors, memories_bytes=self.stream.memories_bytes, placements=parcels
        )
        rows = plan_freeze(cut_out(self._packing_source.held, offered), offered).rows.copy()
        starts = np.array([0, *self._ends], dtype=np.int64)
        rows[:, _SLOT] = numbers[rows[:, _SLOT]] - starts[rows[:, _TARGET_MEMORY]]
        return InBuckets.of(rows, _TARGET_MEMORY, self.buckets)

    def _bind(self, segment: int) -> BoundFreeze:
        packing_source = self._packing_source
        bound = packing_source.kernels.bind_freeze(
            self._table.rows, packing_source.memories, [self.segments[segment]], self._slots
        )
        self._bound[segment] = bound
        return bound

    def _put(self, number: int, segment: int) -> None:
        """Pack a parcel that no kernel can read: its owner writes it to the segment, where it is digested."""
        parcel, memory = self.stream.placements[number], self.segments[segment]
        put = self._packing_source.foreign.get(parcel.name)
        if put is None:
            return
        put(parcel, memory)
        reading = _bound_digest(self._packing_source, self.stream, parcel, memory)
        self.lanes[number] = reading.run(0, len(reading.rows))[0]


def digests_of(
    packing_source: PackingSource,
    packings: Sequence[BucketPacking],
    masks: Sequence[Mask],
    scratch_bytes: int,
) -> Lanes:
    """The digests of the offered tensors: from the parcels that were packed, where they make up a tensor; else it is read once more."""
    numbers = {spec.name: number for number, spec in enumerate(packing_source.offered.tensors)}
    totals = np.zeros((len(numbers), SEEDS), dtype=np.uint32)
    counted = np.zeros(len(numbers), dtype=np.int64)
    for packing, mask in zip(packings, masks, strict=True):
        chosen = np.flatnonzero(mask & packing.packed)
        parcels = [packing.stream.placements[number] for number in chosen]
        tensors = [numbers[parcel.name] for parcel in parcels]
        np.add.at(totals, tensors, packing.lanes[chosen])
        np.add.at(counted, tensors, [count(parcel.region) for parcel in parcels])
    missing = [
        spec
        for spec, found in zip(packing_source.offered.tensors, counted, strict=True)
        if found != spec.elements
    ]
    if missing:
        totals[[numbers[spec.name] for spec in missing]] = 0
        target = packed(missing)
        stream = plan_parcels(packing_source.offered, target, scratch_bytes).stream
        scratch = Memory.from_array(np.empty(scratch_bytes, dtype=np.uint8))
        reading = BucketPacking(packing_source, stream, [scratch])
        for bucket in range(reading.buckets):
            reading.pack(bucket, 0)
        np.add.at(totals, [numbers[parcel.name] for parcel in stream.placements], reading.lanes)
    return totals


def _bound_digest(
    packing_source: PackingSource, stream: Layout, parcel: Placement, memory: Memory
) -> BoundDigest:
    alone = Layout(
        tensors=(stream.specs()[parcel.name],),
        memories_bytes=stream.memories_bytes,
        placements=(parcel,),
    )
    rows = plan_digests(alone).rows.copy()
    rows[:, 0] = 0
    return packing_source.kernels.bind_digest(rows, [memory], 1)


def _range(ends: Table, number: int) -> tuple[int, int]:
    return int(ends[number - 1]) if number else 0, int(ends[number])
