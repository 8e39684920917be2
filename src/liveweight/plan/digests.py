"""Digest plans: what to read, and in which coordinates, to digest a layout's placements.

They follow the layout's own declaration, never a copy plan: a wrong copy shows. A row of the table is a rectangle of elements;
its digest is added to the slot of its placement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from liveweight.plan.strided_loops import merged, unrolled
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Span, count
from liveweight.spec.row_table import Table

COLUMNS = (
    "memory",
    "offset",
    "row_first",
    "row_step",
    "rows",
    "row_stride_bytes",
    "column_first",
    "column_step",
    "columns",
    "column_stride_bytes",
    "item_bytes",
    "slot",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPlan:
    """`rows` is an int64 table with COLUMNS; slot i is the layout's placement i. `size_bytes` is what it reads."""

    layout: str
    rows: Table
    slots: int
    size_bytes: int


def plan_digests(layout: Layout) -> DigestPlan:
    """The rows that digest every placement of a layout."""
    specs = layout.specs()
    tables = [
        digest_rows(slot, p, specs[p.name]) for slot, p in enumerate(layout.placements) if count(p.region)
    ]
    rows = np.concatenate(tables) if tables else np.empty((0, len(COLUMNS)), dtype=np.int64)
    rows.flags.writeable = False
    return DigestPlan(
        layout=layout.fingerprint,
        rows=rows,
        slots=len(layout.placements),
        size_bytes=int(row_bytes(rows).sum()),
    )


def row_bytes(rows: Table) -> Table:
    """How many bytes each row of a digest table reads."""
    read: Table = rows[:, 4] * rows[:, 8] * rows[:, 10]
    return read


def split(rows: Table, limit_bytes: int) -> Table:
    """The same readings in rows of at most about `limit_bytes`, cut between lines: partial digests add up."""
    lines = np.maximum(1, limit_bytes // np.maximum(1, rows[:, 8] * rows[:, 10]))
    pieces = -(-rows[:, 4] // lines)
    if (pieces <= 1).all():
        return rows
    cut = np.repeat(rows, pieces, axis=0)
    number = np.arange(len(cut)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lines, first = np.repeat(lines, pieces), number * np.repeat(lines, pieces)
    cut[:, 1] += first * cut[:, 5]
    cut[:, 2] += first * cut[:, 3]
    cut[:, 4] = np.minimum(lines, cut[:, 4] - first)
    return cut


def digest_rows(slot: int, placement: Placement, spec: TensorSpec) -> Table:
    """The readings of one placement."""
    region, strides = placement.region, placement.strides_bytes
    *above, columns = region or (Span(0, 1),)
    column_stride = strides[-1] if strides else spec.dtype.size_bytes
    nest, scale, first = [], 1, 0
    for span, size, stride in zip(
        reversed(above), reversed(spec.shape[:-1]), reversed(strides[:-1]), strict=True
    ):
        nest.append((span.count, span.step * scale, stride))
        first += span.start * scale
        scale *= size
    loops = merged(nest[::-1])
    rows, row_step, row_stride = loops[-1] if loops else (1, 1, 0)
    steps = unrolled(loops[:-1], 2)
    table = np.empty((len(steps), len(COLUMNS)), dtype=np.int64)
    table[:, 0], table[:, 1] = placement.memory, placement.offset_bytes + steps[:, 1]
    table[:, 2] = first + steps[:, 0]
    table[:, 3:6] = row_step, rows, row_stride
    table[:, 6:] = columns.start, columns.step, columns.count, column_stride, spec.dtype.size_bytes, slot
    return table
