"""Freeze plans: what a source's layout holds, copied into lines of a target's, cast where dtypes differ, digested on the way.

A row is a rectangle of plan/digests, and where it goes. Items, columns and digest are the target's: after a cast, what is digested
is what was written. Only the memory, offset and strides of the first columns are the source's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan import digests
from liveweight.plan.strided_loops import merged, unrolled
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, Span, canonical, count, show
from liveweight.spec.row_table import Table

COLUMNS = (*digests.COLUMNS, "target_memory", "target_offset", "target_row_stride_bytes", "cast")

CASTS = {
    (DType.FLOAT32, DType.BFLOAT16): 1,
    (DType.FLOAT32, DType.FLOAT16): 2,
}
"""The casts that kernels know: to the nearest, ties to even; every NaN becomes the one quiet NaN (0x7FC0, 0x7E00)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezePlan:
    """`rows` is an int64 table with COLUMNS; slot i is the target's placement i. `size_bytes` is what it writes."""

    source: str
    target: str
    rows: Table
    slots: int
    size_bytes: int


def plan_freeze(source: Layout, target: Layout) -> FreezePlan:
    """The moves that fill every placement of the target from the source's placement of the same region.

    Source placements may be strided or transposed; the target's columns are contiguous. Raises ManifestMismatch for a tensor that
    the source lacks, has in another shape, or in a dtype that kernels cannot cast; LayoutInvalid where no region is the same.
    """
    specs, found = source.specs(), _by_region(source)
    target_specs = target.specs()
    tables = []
    for slot, placement in enumerate(target.placements):
        wanted = target_specs[placement.name]
        offered = next((specs[name] for name in wanted.names if name in specs), None)
        if offered is None:
            raise ManifestMismatch([f"{wanted.name} missing"])
        cast = _cast(offered, wanted)
        if count(placement.region) == 0:
            continue
        origin = found.get((offered.name, canonical(placement.region)))
        if origin is None:
            raise LayoutInvalid(f"{wanted.name}: the source has no placement of {show(placement.region)}")
        tables.append(freeze_rows(slot, origin, placement, wanted, cast))
    rows = np.concatenate(tables) if tables else np.empty((0, len(COLUMNS)), dtype=np.int64)
    rows.flags.writeable = False
    return FreezePlan(
        source=source.fingerprint,
        target=target.fingerprint,
        rows=rows,
        slots=len(target.placements),
        size_bytes=int(row_bytes(rows).sum()),
    )


def row_bytes(rows: Table) -> Table:
    """How many bytes each row of a freeze table writes."""
    return digests.row_bytes(rows)


def split(rows: Table, limit_bytes: int) -> Table:
    """The same moves in rows that write at most about `limit_bytes`, cut between lines."""
    lines = np.maximum(1, limit_bytes // np.maximum(1, rows[:, 8] * rows[:, 10]))
    pieces = -(-rows[:, 4] // lines)
    cut = digests.split(rows, limit_bytes)
    if cut is rows:
        return rows
    number = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut[:, 13] += number * np.repeat(lines, pieces) * cut[:, 14]
    return cut


def _by_region(source: Layout) -> dict[tuple[str, Region], Placement]:
    specs = source.specs()
    return {(specs[p.name].name, canonical(p.region)): p for p in reversed(source.placements)}


def _cast(offered: TensorSpec, wanted: TensorSpec) -> int:
    cast = 0 if offered.dtype is wanted.dtype else CASTS.get((offered.dtype, wanted.dtype))
    if cast is None or offered.shape != wanted.shape:
        raise ManifestMismatch([f"{wanted.name} expected {wanted.describe()}, offered {offered.describe()}"])
    return cast


def freeze_rows(slot: int, source: Placement, target: Placement, spec: TensorSpec, cast: int = 0) -> Table:
    """The rows that move one placement to another of the same region. LayoutInvalid where the target's columns are not contiguous."""
    *above, columns = target.region or (Span(0, 1),)
    item = spec.dtype.size_bytes
    source_item = 4 if cast else item
    column_stride = source.strides_bytes[-1] if source.strides_bytes else source_item
    if columns.count > 1 and target.strides_bytes[-1] != item:
        raise LayoutInvalid(f"{spec.name}: frozen into columns that are not contiguous")
    nest, scale, first = [], 1, 0
    for axis in reversed(range(len(above))):
        span = above[axis]
        nest.append((span.count, span.step * scale, source.strides_bytes[axis], target.strides_bytes[axis]))
        first += span.start * scale
        scale *= spec.shape[axis]
    loops = merged(nest[::-1])
    rows, row_step, row_stride, target_stride = loops[-1] if loops else (1, 1, 0, 0)
    steps = unrolled(loops[:-1], 3)
    table = np.empty((len(steps), len(COLUMNS)), dtype=np.int64)
    table[:, 0], table[:, 1] = source.memory, source.offset_bytes + steps[:, 1]
    table[:, 2] = first + steps[:, 0]
    table[:, 3:6] = row_step, rows, row_stride
    table[:, 6:12] = columns.start, columns.step, columns.count, column_stride, item, slot
    table[:, 12], table[:, 13] = target.memory, target.offset_bytes + steps[:, 2]
    table[:, 14:] = target_stride, cast
    return table
