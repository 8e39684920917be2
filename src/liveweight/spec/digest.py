"""The digest: what it is, and its reference implementation in NumPy.

A tensor is rows x columns of units (16 bits read as a signed number; a byte, zero-extended, for one-byte dtypes). For four seeds,
D_s = Σ unit · C_s[column] · R_s[row] mod 2^32, in the full tensor's coordinates: sums over disjoint regions add up. Faster
implementations live in devices/; they give the same bits. It guards against faults, not against attackers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from liveweight.spec.dtype import DType
from liveweight.spec.layout import Placement, packed
from liveweight.spec.manifest import Manifest, TensorSpec, content_digest
from liveweight.spec.region import Region, Span, count, counts

SEEDS = 4
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF
# |unit · C| < 2^30, so up to 2^22 products can be summed in float64 without rounding.
_BLOCK_UNITS = 1 << 18

Lanes: TypeAlias = npt.NDArray[np.uint32]
"""Digests in bulk: one row of four 32-bit lanes each. Sums wrap, as they should."""


def splitmix64(x: int) -> int:
    """The finaliser of splitmix64, on one number."""
    z = (x + _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _splitmix64s(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = x + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def column_key(seed: int) -> int:
    """Where the numbers C of a seed begin in splitmix64's sequence."""
    return splitmix64(2 * seed)


def row_key(seed: int) -> int:
    """Where the numbers R of a seed begin."""
    return splitmix64(2 * seed + 1)


def column_weights(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    """C for these unit columns: shape (seeds, columns), odd."""
    return np.stack(
        [(_hashed(columns, column_key(s)).astype(np.uint16) | 1).view(np.int16) for s in range(SEEDS)]
    )


def row_weights(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """R for these rows: shape (seeds, rows), odd."""
    return np.stack([_hashed(rows, row_key(s)).astype(np.uint32) | 1 for s in range(SEEDS)])


def _hashed(indices: npt.NDArray[np.int64], key: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _splitmix64s(indices.astype(np.uint64) + np.uint64(key))


@functools.lru_cache(maxsize=64)
def _columns_of(span: Span, units: int) -> npt.NDArray[np.float64]:
    elements = span.start + span.step * np.arange(span.count, dtype=np.int64)
    columns = (elements[:, None] * units + np.arange(units)).reshape(-1)
    weights = column_weights(columns).astype(np.float64).T.copy()
    weights.flags.writeable = False
    return weights


def partial(memory: npt.NDArray[np.uint8], placement: Placement, spec: TensorSpec) -> Lanes:
    """The digest of one placement, read from its memory: four lanes."""
    total = np.zeros(SEEDS, dtype=np.uint32)
    if count(placement.region) == 0:
        return total
    planes, rows, columns = _planes(memory, placement, spec)
    width = max(1, _BLOCK_UNITS // spec.dtype.units)
    for plane, numbers in zip(planes, rows, strict=True):
        for left in range(0, columns.count, width):
            part = Span(columns.start + left * columns.step, min(width, columns.count - left), columns.step)
            weights = _columns_of(part, spec.dtype.units)
            lines = max(1, _BLOCK_UNITS // len(weights))
            for top in range(0, len(numbers), lines):
                units = plane[top : top + lines, left : left + width].reshape(-1, len(weights))
                sums = (units.astype(np.float64) @ weights).astype(np.int64).astype(np.uint32)
                total += (sums * row_weights(numbers[top : top + lines]).T).sum(axis=0, dtype=np.uint32)
    return total


def _planes(
    memory: npt.NDArray[np.uint8], placement: Placement, spec: TensorSpec
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64], Span]:
    """The units as planes of rows x columns x units per element, without a copy; the rows' numbers; the span of columns."""
    region, strides, shape = placement.region, placement.strides_bytes, spec.shape
    while len(region) < 3:
        region, strides, shape = (Span(0, 1), *region), (0, *strides), (1, *shape)
    unit = np.dtype("<i2" if spec.dtype.unit_bytes == 2 else "u1")
    units = np.ndarray(
        (*counts(region), spec.dtype.units),
        unit,
        memory.data,
        placement.offset_bytes,
        (*strides, unit.itemsize),
    )
    rows = np.zeros(1, dtype=np.int64)
    for span, size in zip(region[:-1], shape[:-1], strict=True):
        rows = (
            rows[:, None] * size + span.start + span.step * np.arange(span.count, dtype=np.int64)
        ).reshape(-1)
    height = region[-2].count
    if len(region) > 3:
        units = units.reshape(-1, *units.shape[-3:])
    return units, rows.reshape(-1, height), region[-1]


def to_hex(lanes: Lanes) -> str:
    """Four lanes as 32 hex digits, lane 0 first."""
    return "".join(f"{int(lane):08x}" for lane in lanes)


def from_hex(digest: str) -> Lanes:
    """The four lanes of 32 hex digits."""
    return np.array([int(digest[i : i + 8], 16) for i in range(0, 32, 8)], dtype=np.uint32)


def combine(parts: Iterable[tuple[Region, Lanes]]) -> Lanes | None:
    """The digest of a tensor from its regions' digests: equal regions must agree (None if not), disjoint ones add up.

    That the regions tile the tensor is checked once, when they are planned (`region.check_tiling`).
    """
    seen: dict[Region, Lanes] = {}
    for region, lanes in parts:
        known = seen.setdefault(region, lanes)
        if not np.array_equal(known, lanes):
            return None
    return np.sum(list(seen.values()), axis=0, dtype=np.uint32) if seen else np.zeros(SEEDS, dtype=np.uint32)


class ContentDigest:
    """The digest of a version from its tensors' lanes, in the manifest's order: `Manifest.digest`, without the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        numbers = {tensor.name: number for number, tensor in enumerate(manifest)}
        self._order = np.array([numbers[tensor.name] for tensor in manifest.in_name_order()], dtype=np.int64)
        self._names = manifest.names_digest()

    def of(self, lanes: Lanes) -> str:
        """The version's digest."""
        return content_digest(self._names, lanes[self._order].astype(">u4").tobytes())


def digest_array(array: npt.NDArray[np.generic], dtype: DType, shape: Sequence[int] | None = None) -> str:
    """The digest of one whole, contiguous array; `shape` where the array is raw bytes."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    spec = TensorSpec(name="array", dtype=dtype, shape=tuple(array.shape if shape is None else shape))
    return to_hex(partial(raw, packed([spec]).placements[0], spec))
