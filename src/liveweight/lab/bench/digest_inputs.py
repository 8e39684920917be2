"""What the digest's benchmark works on: page-aligned arrays, already touched; tables; and what each contender must have done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from liveweight.devices.kernels import Table
from liveweight.errors import DigestMismatch
from liveweight.plan.copies import plan_copies
from liveweight.plan.digests import plan_digests
from liveweight.plan.freezes import plan_freeze
from liveweight.spec.digest import Lanes, digest_array, from_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, whole

COLUMNS = 4096
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A bfloat16 matrix, a float32 one of the same shape, and one target for both."""

    words: npt.NDArray[np.uint16]
    floats: npt.NDArray[np.float32]
    target: npt.NDArray[np.uint16]
    spec: TensorSpec
    region: Region
    copy_rows: Table
    digest_rows: Table
    freeze_rows: Table
    cast_rows: Table
    digest_of_words: Lanes
    cast_of_floats: npt.NDArray[np.uint16]
    digest_of_cast: Lanes

    def check(self, name: str, result: Lanes | None) -> None:
        """Raise DigestMismatch unless a contender, by its name, left the right bytes and gave the right digest."""
        casts, digests = "cast" in name, "digest" in name
        moves = casts or "copy" in name or name == "memmove"
        wanted = self.cast_of_floats if casts else self.words
        if moves and not np.array_equal(self.target, wanted):
            raise DigestMismatch([name], "the benchmark's target")
        expected = self.digest_of_cast if casts else self.digest_of_words
        if digests and (result is None or not np.array_equal(result, expected)):
            raise DigestMismatch([name], "the benchmark's digest")


def make_inputs(size_mb: int) -> Inputs:
    """A matrix of that many MB in bfloat16, and everything around it."""
    rows = max(1, size_mb * (1 << 20) // (2 * COLUMNS))
    shape = (rows, COLUMNS)
    half = TensorSpec(name="w", dtype=DType.BFLOAT16, shape=shape)
    single = TensorSpec(name="w", dtype=DType.FLOAT32, shape=shape)
    floats = _pages(shape, np.float32)
    _fill(floats)
    words, target = _pages(shape, np.uint16), _pages(shape, np.uint16)
    words[...] = (floats.view(np.uint32) >> np.uint32(15)).astype(np.uint16)
    target[...] = 0
    bits = floats.view(np.uint32)
    cast = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    one, other = packed([half]), packed([single])
    return Inputs(
        words=words,
        floats=floats,
        target=target,
        spec=half,
        region=whole(shape),
        copy_rows=plan_copies(one, one).rows,
        digest_rows=plan_digests(one).rows,
        freeze_rows=plan_freeze(one, one).rows,
        cast_rows=plan_freeze(other, one).rows,
        digest_of_words=from_hex(digest_array(words, DType.BFLOAT16)),
        cast_of_floats=cast,
        digest_of_cast=from_hex(digest_array(cast, DType.BFLOAT16)),
    )


def _fill(floats: npt.NDArray[np.float32]) -> None:
    """Numbers like a trained matrix's, made a block at a time: no second array of that size."""
    rng = np.random.default_rng(0)
    for top in range(0, len(floats), 1024):
        part = floats[top : top + 1024]
        rng.standard_normal(part.shape, dtype=np.float32, out=part)


def _pages(shape: tuple[int, int], dtype: Any) -> npt.NDArray[Any]:
    """An array that begins at a page, as arenas and shadows do. Filling it is the caller's."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    raw = np.empty(size + PAGE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    pages: npt.NDArray[Any] = raw[start : start + size].view(dtype).reshape(shape)
    return pages
