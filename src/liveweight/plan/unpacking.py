"""Unpacking plans: how the parcels of a bucket get to where a rank keeps them, digested on the way.

A parcel is moved and digested at once (plan/freezes) to the first placement that wants it in contiguous columns. Where there is none, it
is read for its digest (plan/digests); every other copy of it is one of plan/copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from liveweight.plan import copies, digests, freezes
from liveweight.plan.parcels import ParcelPlan
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.row_table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class InBuckets:
    """A table that is run bucket by bucket: of bucket i the rows [bounds[i], bounds[i + 1]). Buckets are one memory, 0, when it is run."""

    rows: Table
    bounds: list[int]

    @classmethod
    def of(cls, rows: Table, column: int, buckets: int) -> InBuckets:
        """Rows in any order, whose bucket is in that column."""
        ordered = rows[np.argsort(rows[:, column], kind="stable")]
        bounds = np.searchsorted(ordered[:, column], np.arange(buckets + 1)).tolist()
        ordered[:, column] = 0
        return cls(rows=ordered, bounds=bounds)

    def range_of(self, bucket: int) -> tuple[int, int]:
        """The first row of a bucket, and the one after its last."""
        return self.bounds[bucket], self.bounds[bucket + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacking:
    """Slots are the parcels of a bucket, in the stream's order; `counts` says how many each has."""

    moves: InBuckets
    reads: InBuckets
    copies: InBuckets
    counts: list[int]

    @property
    def slots(self) -> int:
        """As many as the fullest bucket needs."""
        return max(self.counts, default=0)


def plan_unpacking(plan: ParcelPlan) -> Unpacking:
    """Every home of every parcel is filled, and every parcel digested once."""
    buckets, specs = len(plan.stream.memories_bytes), plan.stream.specs()
    slots, counts = _slots(plan.stream)
    moves, reads, rest = dict[_ParcelKey, Table](), list[Table](), list[Table]()
    for parcel, home in plan.homes:
        spec, key = specs[parcel.name], _parcel_key(parcel)
        there = _part(home, parcel)
        if key not in moves and _contiguous(there, spec):
            moves[key] = freezes.freeze_rows(slots[key], parcel, there, spec)
        else:
            rest.append(copies.copy_rows(parcel, home, parcel.region, spec.dtype.size_bytes))
    for parcel in plan.stream.placements:
        if _parcel_key(parcel) not in moves:
            reads.append(digests.digest_rows(slots[_parcel_key(parcel)], parcel, specs[parcel.name]))
    return Unpacking(
        moves=InBuckets.of(_together(list(moves.values()), freezes.COLUMNS), 0, buckets),
        reads=InBuckets.of(_together(reads, digests.COLUMNS), 0, buckets),
        copies=InBuckets.of(_together(rest, copies.COLUMNS), 0, buckets),
        counts=counts,
    )


_ParcelKey = tuple[int, int]


def _parcel_key(parcel: Placement) -> _ParcelKey:
    """Bucket and offset: no two parcels share them."""
    return parcel.memory, parcel.offset_bytes


def _slots(stream: Layout) -> tuple[dict[_ParcelKey, int], list[int]]:
    counts = [0] * len(stream.memories_bytes)
    slots = {}
    for parcel in stream.placements:
        slots[_parcel_key(parcel)] = counts[parcel.memory]
        counts[parcel.memory] += 1
    return slots, counts


def _part(home: Placement, parcel: Placement) -> Placement:
    """Where a parcel's region lies in the placement that it is a part of."""
    offset, strides = copies.part_offset_and_strides(home, parcel.region)
    return Placement(
        name=parcel.name,
        region=parcel.region,
        memory=home.memory,
        offset_bytes=offset,
        strides_bytes=tuple(strides),
    )


def _contiguous(placement: Placement, spec: TensorSpec) -> bool:
    *_, columns = placement.region or (None,)
    return columns is None or columns.count == 1 or placement.strides_bytes[-1] == spec.dtype.size_bytes


def _together(tables: Sequence[Table], columns: Sequence[str]) -> Table:
    return np.concatenate(tables) if tables else np.empty((0, len(columns)), dtype=np.int64)
