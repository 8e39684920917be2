"""What is checked when a table is bound: every row stays inside its memories. All rows at once, in NumPy.

The kernels trust these checks and make none of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid

Table: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Memories: TypeAlias = Sequence[Memory]

COPY_COLUMNS, DIGEST_COLUMNS, FREEZE_COLUMNS = 11, 12, 16
CASTS = 3
_SIZES = (1, 2, 4, 8)
_LIMIT = 2.0**62  # far beyond any memory, and int64 does not wrap below it


def bound_copy(rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> Table:
    """A copy table with addresses in place of offsets."""
    table = _checked(rows, COPY_COLUMNS)
    outer, inner, chunk = table[:, 4], table[:, 7], table[:, 10]
    _refuse(table, (table[:, 4:] < 0).any(axis=1), "has a negative count, stride or size")
    _refuse_endless(table, outer, inner, chunk)
    empty = (outer == 0) | (inner == 0) | (chunk == 0)
    read = _extent(table, [(outer, table[:, 5]), (inner, table[:, 8])], chunk)
    written = _extent(table, [(outer, table[:, 6]), (inner, table[:, 9])], chunk)
    _resolve_addresses(table, 0, 1, np.where(empty, 0, read), sources, writes=False)
    _resolve_addresses(table, 2, 3, np.where(empty, 0, written), targets, writes=True)
    _refuse(table, ~empty & _overlap(table[:, 1], read, table[:, 3], written), "copies memory onto itself")
    return _frozen(table)


def bound_digest(rows: Table, memories: Sequence[Memory], slots: int) -> Table:
    """A digest table with addresses in place of offsets."""
    table = _checked(rows, DIGEST_COLUMNS)
    read = _check_rectangles(table, table[:, 10], slots)
    _resolve_addresses(table, 0, 1, read, memories, writes=False)
    return _frozen(table)


def bound_freeze(rows: Table, sources: Sequence[Memory], targets: Sequence[Memory], slots: int) -> Table:
    """A freeze table with addresses in place of offsets."""
    table = _checked(rows, FREEZE_COLUMNS)
    count, columns, item, cast = table[:, 4], table[:, 8], table[:, 10], table[:, 15]
    _refuse(table, (cast < 0) | (cast >= CASTS), "has an unknown cast")
    _refuse(table, (cast > 0) & (item != 2), "casts to items that have not 2 bytes")
    _refuse(table, table[:, 14] < 0, "has a negative stride")
    read = _check_rectangles(table, np.where(cast > 0, 4, item), slots)
    empty = read == 0
    written = np.where(empty, 0, _extent(table, [(count, table[:, 14]), (columns, item)], item))
    _resolve_addresses(table, 0, 1, read, sources, writes=False)
    _resolve_addresses(table, 12, 13, written, targets, writes=True)
    _refuse(table, ~empty & (count > 1) & (table[:, 14] < columns * item), "writes lines that overlap")
    _refuse(table, ~empty & _overlap(table[:, 1], read, table[:, 13], written), "freezes memory onto itself")
    return _frozen(table)


def _checked(rows: Table, columns: int) -> Table:
    """A contiguous copy of the table."""
    if rows.ndim != 2 or rows.shape[1] != columns or rows.dtype != np.int64:
        raise LayoutInvalid(
            f"a table of {rows.dtype} and shape {rows.shape}, not of int64 with {columns} columns"
        )
    return np.array(rows, dtype=np.int64, order="C", copy=True)


def _frozen(table: Table) -> Table:
    table.flags.writeable = False
    return table


def _check_rectangles(table: Table, source_item: Table, slots: int) -> Table:
    """Refuse rectangles that mean nothing; how many bytes each spans at its source."""
    count, columns, item = table[:, 4], table[:, 8], table[:, 10]
    _refuse(table, (table[:, 2:10] < 0).any(axis=1), "has a negative number, count or stride")
    _refuse(table, ~np.isin(item, _SIZES), f"has items of a size other than {_SIZES}")
    _refuse(
        table, (table[:, 11] < 0) | (table[:, 11] >= slots), f"adds to a slot beyond the {slots} there are"
    )
    _refuse_endless(table, count, columns, item)
    _extent(table, [(count, table[:, 3])], table[:, 2])
    _extent(table, [(columns, table[:, 7])], table[:, 6], scale=8)
    read = _extent(table, [(count, table[:, 5]), (columns, table[:, 9])], source_item)
    return np.where((count == 0) | (columns == 0), 0, read)


def _extent(table: Table, loops: Sequence[tuple[Table, Table]], last: Table, scale: int = 1) -> Table:
    """Where a nest of loops ends: Σ (count - 1) · stride + last. Refused where 63 bits could not hold it."""
    rough = last.astype(np.float64)
    exact = last.copy()
    for count, stride in loops:
        rough += np.maximum(count - 1, 0).astype(np.float64) * stride
    _refuse(table, rough * scale >= _LIMIT, "reaches beyond any memory")
    for count, stride in loops:
        exact += np.maximum(count - 1, 0) * stride
    return exact


def _refuse_endless(table: Table, *counts: Table) -> None:
    """Strides of zero can repeat a byte for ever without leaving a memory."""
    steps = np.prod([count.astype(np.float64) for count in counts], axis=0)
    _refuse(table, steps >= _LIMIT, "has more steps than anybody can wait for")


def _resolve_addresses(
    table: Table, number: int, offset: int, extent: Table, memories: Sequence[Memory], *, writes: bool
) -> None:
    """Refuse rows that leave their memory; turn offsets into addresses. Rows of no bytes may point anywhere."""
    sizes = np.array([memory.size_bytes for memory in memories] or [0], dtype=np.int64)
    addresses = np.array([memory.address for memory in memories] or [0], dtype=np.int64)
    writable = np.array([memory.writable for memory in memories] or [False])
    used = extent > 0
    _refuse(
        table,
        used & ((table[:, number] < 0) | (table[:, number] >= len(memories))),
        "names a memory that is not there",
    )
    which = np.where(used, table[:, number], 0)
    start = np.where(used, table[:, offset], 0)
    outside = (start < 0) | (start > sizes[which]) | (extent > sizes[which] - start)
    _refuse(table, used & outside, "leaves its memory")
    if writes:
        _refuse(table, used & ~writable[which], "writes into memory that is read-only")
    table[:, offset] = np.where(used, addresses[which] + start, 0)


def _overlap(a: Table, a_size: Table, b: Table, b_size: Table) -> Flags:
    """Whether what is read and what is written lie over each other. Strided ones that interleave count as well."""
    return np.asarray((a < b + b_size) & (b < a + a_size))


def _refuse(table: Table, wrong: Flags | np.bool_, why: str) -> None:
    if np.any(wrong):
        row = int(np.argmax(wrong))
        raise LayoutInvalid(f"row {row} of {len(table)} {why}: {table[row].tolist()}")
