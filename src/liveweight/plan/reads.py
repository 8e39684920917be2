"""Read plans: which runs of a source's memory are fetched, one-sided, to make the copies of a plan, and where they land.

A copy of few, long chunks is fetched chunk by chunk, straight to where they belong (`direct`) or side by side into a landing. One of many
short chunks is fetched as the one run that covers them, into a landing, and copied out from there: a read costs as much as the transfer of
READ_COST_BYTES more. Reads are gathered into pieces, which are posted, awaited and copied out one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from liveweight.plan.copies import row_bytes, split
from liveweight.spec.layout import ALIGNMENT_BYTES, align
from liveweight.spec.row_table import Table

READ_COST_BYTES = 8 << 10
"""Measured with NIXL 1.5 over UCX's shared memory: 5 to 8 us for a read of 4 KiB, at 1.3 to 1.8 GB/s in long reads; over TCP it is more."""

PIECE_BYTES = 4 << 20
"""What a piece fetches at most: enough to be worth a request, little enough that a stop and a pace are felt."""

PIECE_READS = 4096

COLUMNS = ("source_memory", "source_offset", "target_memory", "target_offset", "size_bytes")
"""Of a read. `target_memory` LANDING: the offset counts from the beginning of the piece's landing."""

LANDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """`rows` are the copies, as plan/copies has them. Piece i has rows up to piece_rows[i], reads up to piece_reads[i] and, of
    `landed`, copies from its landing (memory 0, offsets within it), up to piece_landed[i]."""

    rows: Table
    reads: Table
    landed: Table
    piece_rows: Table
    piece_reads: Table
    piece_landed: Table

    @property
    def lands(self) -> bool:
        """Whether it needs landings at all."""
        return len(self.landed) > 0


def plan_reads(copies: Table, *, direct: bool) -> ReadPlan:
    """The reads that make these copies; without `direct`, all of them land first."""
    build = _Build()
    for row in copies:
        covered = _covered(row)
        for part in split(row[None, :], PIECE_BYTES) if covered is None else covered:
            build.add(part, covers=covered is not None, direct=direct)
    return build.done()


def _covered(row: Table) -> list[Table] | None:
    """The row in parts whose covering runs fit a piece, if fetching those is cheaper than fetching every chunk."""
    chunks, chunk = int(row[4] * row[7]), int(row[10])
    if chunks <= 1:
        return None
    parts = _cut(row)
    covering = sum(_extent(part) + READ_COST_BYTES for part in parts)
    return parts if covering < chunks * (chunk + READ_COST_BYTES) else None


def _extent(row: Table) -> int:
    """From the first byte that a row reads to the last."""
    return int((row[4] - 1) * row[5] + (row[7] - 1) * row[8] + row[10])


def _cut(row: Table) -> list[Table]:
    """A row in parts whose extents fit a piece: cut along the loop that strides furthest through the source."""
    if _extent(row) <= PIECE_BYTES:
        return [row]
    loops = [(int(row[5]), 4), (int(row[8]), 7), (1, 10)]
    stride, axis = max((loop for loop in loops if row[loop[1]] > 1), default=(1, 10))
    inside = row.copy()
    inside[axis] = 1
    count = int(row[axis])
    step = max(1, (PIECE_BYTES - _extent(inside)) // stride + 1) if stride else count
    parts: list[Table] = []
    for start in range(0, count, step):
        part = row.copy()
        part[1] += start * stride
        part[3] += start * (1 if axis == 10 else int(row[axis + 2]))
        part[axis] = min(step, count - start)
        parts += _cut(part) if step == 1 and _extent(part) > PIECE_BYTES else [part]
    return parts


class _Build:
    """A plan in the making: rows come one by one, and fill one piece after the other."""

    def __init__(self) -> None:
        self._rows: list[Table] = []
        self._reads: list[Table] = []
        self._landed: list[Table] = []
        self._ends: list[tuple[int, int, int]] = []
        self._fetched = self._landing = self._count = self._total = 0

    def add(self, row: Table, *, covers: bool, direct: bool) -> None:
        """One more row; it fits a piece of its own."""
        size = int(row_bytes(row[None, :])[0])
        if size == 0:
            return
        fetched = _extent(row) if covers else size
        reads = 1 if covers else int(row[4] * row[7])
        full = self._fetched + fetched > PIECE_BYTES or self._landing + fetched > PIECE_BYTES
        if self._count and (full or self._count + reads > PIECE_READS):
            self.end_piece()
        landing = covers or not direct
        self._rows.append(row)
        self._reads.append(_reads(row, self._landing if landing else None, covers=covers))
        if landing:
            self._landed.append(_from_landing(row, self._landing, covers=covers))
            self._landing = align(self._landing + fetched, ALIGNMENT_BYTES)
        self._fetched += fetched
        self._count += reads
        self._total += reads

    def end_piece(self) -> None:
        """The next row begins a new piece."""
        self._ends.append((len(self._rows), self._total, len(self._landed)))
        self._fetched = self._landing = self._count = 0

    def done(self) -> ReadPlan:
        """The plan."""
        if self._count:
            self.end_piece()
        ends = np.array(self._ends, dtype=np.int64).reshape(-1, 3)
        return ReadPlan(
            rows=_table(self._rows, 11),
            reads=np.concatenate(self._reads) if self._reads else np.empty((0, 5), dtype=np.int64),
            landed=_table(self._landed, 11),
            piece_rows=ends[:, 0],
            piece_reads=ends[:, 1],
            piece_landed=ends[:, 2],
        )


def _reads(row: Table, landing: int | None, *, covers: bool) -> Table:
    """The reads of a row: to its target, or from that offset of a landing on."""
    if covers:
        return np.array([[row[0], row[1], LANDING, landing, _extent(row)]], dtype=np.int64)
    outer, inner = np.arange(row[4])[:, None], np.arange(row[7])[None, :]
    reads = np.empty((int(row[4] * row[7]), len(COLUMNS)), dtype=np.int64)
    reads[:, 0], reads[:, 1] = row[0], (row[1] + outer * row[5] + inner * row[8]).ravel()
    if landing is None:
        reads[:, 2], reads[:, 3] = row[2], (row[3] + outer * row[6] + inner * row[9]).ravel()
    else:
        reads[:, 2], reads[:, 3] = LANDING, landing + np.arange(len(reads)) * row[10]
    reads[:, 4] = row[10]
    return reads


def _from_landing(row: Table, offset: int, *, covers: bool) -> Table:
    """The copy of a row out of a landing: of a covering run as the source lies, else of chunks side by side."""
    landed = row.copy()
    landed[0], landed[1] = 0, offset
    if not covers:
        landed[5], landed[8] = row[7] * row[10], row[10]
    return landed


def _table(rows: list[Table], columns: int) -> Table:
    return np.stack(rows) if rows else np.empty((0, columns), dtype=np.int64)
