"""The kernels in NumPy: for machines where the C kernels could not be built. The same tables, the same bits, slower.

Rows become strided views of memory; casts are integer arithmetic, so that they round and treat NaN as the C kernels do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from liveweight.devices.bounds import Memories, Table, bound_copy, bound_digest, bound_freeze
from liveweight.devices.memory import Memory
from liveweight.spec.digest import SEEDS, Lanes, column_weights, row_weights

# |unit · C| < 2^30: so many products can be summed in float64 without rounding, and the block stays in a cache.
_BLOCK_UNITS = 1 << 16
_ITEMS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_BFLOAT16 = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyCopy:
    """A bound copy table. `keep` holds the memories."""

    rows: Table
    keep: tuple[Memory, ...]

    def run(self, first: int, last: int) -> None:
        """Execute rows [first, last)."""
        for row in _range(self.rows, first, last):
            _, source, _, target, outer, out_s, out_t, inner, in_s, in_t, chunk = row
            item = chunk if chunk in _ITEMS else 1
            shape = (outer, inner, chunk // item)
            if 0 not in shape:
                _view(target, shape, (out_t, in_t, item), item)[...] = _view(
                    source, shape, (out_s, in_s, item), item
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyDigest:
    """A bound digest table."""

    rows: Table
    keep: tuple[Memory, ...]
    slots: int

    def run(self, first: int, last: int) -> Lanes:
        """The partial digests of rows [first, last)."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        for row in _range(self.rows, first, last):
            if row[4] and row[8]:
                lanes[row[11]] += _digest(row)
        return lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyFreeze:
    """A bound freeze table."""

    rows: Table
    keep: tuple[Memory, ...]
    slots: int

    def run(self, first: int, last: int) -> Lanes:
        """Move rows [first, last); their partial digests."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        for row in _range(self.rows, first, last):
            if row[4] and row[8]:
                _move(row)
                item, target, stride = row[10], row[13], row[14]
                lanes[row[11]] += _digest([0, target, *row[2:5], stride, *row[6:9], item, item])
        return lanes

    def move(self, first: int, last: int) -> None:
        """Move rows [first, last) without a digest."""
        for row in _range(self.rows, first, last):
            if row[4] and row[8]:
                _move(row)


class NumpyKernels:
    """The fallback."""

    def bind_copy(self, rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> NumpyCopy:
        """A copy table, checked."""
        return NumpyCopy(rows=bound_copy(rows, sources, targets), keep=(*sources, *targets))

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> NumpyDigest:
        """A digest table, checked."""
        return NumpyDigest(rows=bound_digest(rows, memories, slots), keep=tuple(memories), slots=slots)

    def bind_freeze(self, rows: Table, sources: Memories, targets: Memories, slots: int) -> NumpyFreeze:
        """A freeze table, checked."""
        table = bound_freeze(rows, sources, targets, slots)
        return NumpyFreeze(rows=table, keep=(*sources, *targets), slots=slots)


def _range(table: Table, first: int, last: int) -> list[list[int]]:
    if not 0 <= first <= last <= len(table):
        raise ValueError(f"rows {first} to {last} of a table of {len(table)}")
    rows: list[list[int]] = table[first:last].tolist()
    return rows


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> npt.NDArray[Any]:
    """Items at an address; bounds were checked when the table was bound."""
    extent = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True)) + item
    raw = memoryview((ctypes.c_uint8 * extent).from_address(address))
    return np.ndarray(shape, np.dtype(_ITEMS[item]), raw, 0, strides)


def _digest(row: Sequence[int]) -> Lanes:
    """The digest of one rectangle, in blocks."""
    _, address, row_first, row_step, rows, row_stride, first, step, columns, stride, item = row[:11]
    unit = min(2, item)
    units = item // unit
    total = np.zeros(SEEDS, dtype=np.uint32)
    width = min(columns, _BLOCK_UNITS // units)
    for left in range(0, columns, width):
        part = min(width, columns - left)
        elements = first + step * np.arange(left, left + part, dtype=np.int64)
        weights = (
            column_weights((elements[:, None] * units + np.arange(units)).reshape(-1)).astype(np.float64).T
        )
        height = max(1, _BLOCK_UNITS // len(weights))
        for top in range(0, rows, height):
            lines = min(height, rows - top)
            items = _view(
                address + top * row_stride + left * stride, (lines, part), (row_stride, stride), item
            )
            flat = np.ascontiguousarray(items).reshape(lines, part).view("<i2" if unit == 2 else "u1")
            sums = (flat.astype(np.float64) @ weights).astype(np.int64).astype(np.uint32)
            numbers = row_first + row_step * np.arange(top, top + lines, dtype=np.int64)
            total += (sums * row_weights(numbers).T).sum(axis=0, dtype=np.uint32)
    return total


def _move(row: Sequence[int]) -> None:
    """Copy or cast one rectangle, in blocks."""
    _, address, _, _, rows, row_stride, _, _, columns, stride, item, _, _, target, to_stride, cast = row
    source_item = 4 if cast else item
    height = max(1, _BLOCK_UNITS // columns)
    for top in range(0, rows, height):
        shape = (min(height, rows - top), columns)
        source = _view(address + top * row_stride, shape, (row_stride, stride), source_item)
        values = source if not cast else bfloat16_bits(source) if cast == _BFLOAT16 else _float16(source)
        _view(target + top * to_stride, shape, (to_stride, item), item)[...] = values


def bfloat16_bits(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """float32 to bfloat16, to the nearest, ties to even; every NaN becomes 0x7FC0."""
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint32(0x7FC0), rounded)


def _float16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """float32 to float16, to the nearest, ties to even; every NaN becomes 0x7E00."""
    values = np.ascontiguousarray(bits).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        halves = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7E00), halves)
