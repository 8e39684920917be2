"""Tables of a freeze: which rows fill an arena, made from a few templates.

Tensors of one geometry differ only in where they lie, and a model has few geometries: rows are planned once per geometry, cut small
enough to be shared by threads, and shifted to their places for each tensor. Pure: no bytes are touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from liveweight.devices.copy_ranges import ROW_BYTES
from liveweight.plan import digests, freezes
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, packed_regions
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, count
from liveweight.spec.row_table import Table

_AT = {
    name: column for column, name in enumerate(freezes.COLUMNS)
}  # a digest's columns are the first of them


class Templates:
    """Rows by geometry, for a tensor whose source begins at byte 0 of memory 0 and whose target does too, in slot 0."""

    def __init__(self) -> None:
        self._freezes: dict[tuple[DType, DType, tuple[int, ...], Region, tuple[int, ...]], Table] = {}
        self._digests: dict[tuple[DType, tuple[int, ...], Region], Table] = {}

    def freeze(
        self, dtype: DType, offered: TensorSpec, region: Region, strides_bytes: tuple[int, ...]
    ) -> Table:
        """The rows that copy, and cast, a strided part of a tensor to a packed one."""
        key = (dtype, offered.dtype, offered.shape, region, strides_bytes)
        if key not in self._freezes:
            source = _strided(replace(offered, dtype=dtype), region, strides_bytes)
            plan = freezes.plan_freeze(source, packed_regions([(offered, region)]))
            self._freezes[key] = cut_columns(freezes.split(plan.rows, ROW_BYTES), ROW_BYTES)
        return self._freezes[key]

    def digest(self, offered: TensorSpec, region: Region) -> Table:
        """The rows that read a packed part of a tensor."""
        key = (offered.dtype, offered.shape, region)
        if key not in self._digests:
            rows = digests.plan_digests(packed_regions([(offered, region)])).rows
            self._digests[key] = cut_columns(digests.split(rows, ROW_BYTES), ROW_BYTES)
        return self._digests[key]


def freeze_rows(parts: Sequence[Table], offsets_bytes: Sequence[int]) -> Table:
    """One table from templates: part i reads memory i, writes to its offset in the arena, and digests into slot i."""
    rows, part = _stacked(parts, len(freezes.COLUMNS))
    rows[:, _AT["memory"]] = part
    rows[:, _AT["slot"]] = part
    rows[:, _AT["target_offset"]] += np.array(offsets_bytes, dtype=np.int64)[part]
    return rows


def digest_rows(parts: Sequence[Table], offsets_bytes: Sequence[int]) -> Table:
    """One table from templates: part i reads the arena at its offset, and digests into slot i."""
    rows, part = _stacked(parts, len(digests.COLUMNS))
    rows[:, _AT["slot"]] = part
    rows[:, _AT["offset"]] += np.array(offsets_bytes, dtype=np.int64)[part]
    return rows


def cut_columns(rows: Table, limit_bytes: int) -> Table:
    """The same rows of a freeze or digest table; lines longer than the limit, which are single after `split`, in several parts."""
    width = np.maximum(1, limit_bytes // rows[:, _AT["item_bytes"]])
    long = (rows[:, _AT["rows"]] == 1) & (rows[:, _AT["columns"]] > width)
    pieces = np.where(long, -(-rows[:, _AT["columns"]] // width), 1)
    if not long.any():
        return rows
    cut, piece = np.repeat(rows, pieces, axis=0), _numbers(pieces)
    first = np.repeat(np.where(long, width, 0), pieces) * piece
    cut[:, _AT["offset"]] += first * cut[:, _AT["column_stride_bytes"]]
    cut[:, _AT["column_first"]] += first * cut[:, _AT["column_step"]]
    left = cut[:, _AT["columns"]] - first
    cut[:, _AT["columns"]] = np.where(
        np.repeat(long, pieces), np.minimum(np.repeat(width, pieces), left), left
    )
    if cut.shape[1] == len(freezes.COLUMNS):
        cut[:, _AT["target_offset"]] += first * cut[:, _AT["item_bytes"]]
    return cut


def _strided(spec: TensorSpec, region: Region, strides_bytes: tuple[int, ...]) -> Layout:
    """The layout of a part of one tensor with these strides, alone in its memory."""
    steps = sum((span.count - 1) * stride for span, stride in zip(region, strides_bytes, strict=True))
    size = steps + spec.dtype.size_bytes if count(region) else 0
    place = Placement(name=spec.name, region=region, memory=0, offset_bytes=0, strides_bytes=strides_bytes)
    return Layout(tensors=(spec,), memories_bytes=(size,), placements=(place,))


def _stacked(parts: Sequence[Table], columns: int) -> tuple[Table, Table]:
    """All rows in one table, and which part each is of."""
    if not parts:
        return np.empty((0, columns), dtype=np.int64), np.empty(0, dtype=np.int64)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), sizes)


def _numbers(pieces: Table) -> Table:
    """0, 1, ... for each run of that many."""
    numbers: Table = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return numbers
