"""The digest in plain torch, on any device: of weights that the host's kernels cannot reach. int64 arithmetic only.

Weights come from spec/digest; this file owns the blocks, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from liveweight.errors import LayoutInvalid
from liveweight.spec.digest import SEEDS, Lanes, column_weights, row_weights
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, Span, check_inside, count, counts

if TYPE_CHECKING:
    import torch

Numbers: TypeAlias = npt.NDArray[np.int64]

# A processor wants blocks that stay in its cache, anything else few launches.
_CPU_BLOCK_UNITS, _BLOCK_UNITS = 1 << 15, 1 << 22
_LOW = 0xFFFF_FFFF


def digest_tensor(
    view: torch.Tensor, region: Region, spec: TensorSpec, *, block_units: int | None = None
) -> Lanes:
    """The partial digest of a region of tensor `spec` that `view` holds, in whatever strides; four lanes.

    At most about `block_units` units are widened to int64 at a time, on the view's own device; left out: what suits the device.
    """
    check_inside(spec.name, region, spec.shape)
    if tuple(view.shape) != counts(region) or view.element_size() != spec.dtype.size_bytes:
        raise LayoutInvalid(
            f"{spec.name}: a view of {view.dtype}{list(view.shape)} does not hold {counts(region)} of {spec.describe()}"
        )
    if count(region) == 0:
        return np.zeros(SEEDS, dtype=np.uint32)
    if block_units is None:
        block_units = _CPU_BLOCK_UNITS if view.device.type == "cpu" else _BLOCK_UNITS
    columns = region[-1] if region else Span(0, 1)
    total, numbers = np.zeros(SEEDS, dtype=np.uint32), _row_numbers(region, spec.shape)
    for plane in _planes(_raw(view), columns.count):
        rows, numbers = numbers[: len(plane)], numbers[len(plane) :]
        total += _lines(plane, rows, columns, spec.dtype.units, block_units)
    return total


def _raw(view: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size: copying those changes no bit, as copying a bool may."""
    import torch

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return view.detach().view(sizes[view.element_size()])


def _planes(view: torch.Tensor, columns: int) -> Iterator[torch.Tensor]:
    """The view as matrices, in order, none of them a copy."""
    if view.is_contiguous() or view.ndim < 2:
        yield view.reshape(-1, columns)
    elif view.ndim == 2:
        yield view
    else:
        for part in view:
            yield from _planes(part, columns)


def _lines(lines: torch.Tensor, numbers: Numbers, columns: Span, units: int, block_units: int) -> Lanes:
    import torch

    total = np.zeros(SEEDS, dtype=np.uint32)
    width = max(1, min(columns.count, block_units // units))
    height = max(1, block_units // (width * units))
    for left in range(0, columns.count, width):
        part = min(width, columns.count - left)
        elements = columns.start + columns.step * np.arange(left, left + part, dtype=np.int64)
        weights = column_weights((elements[:, None] * units + np.arange(units)).reshape(-1)).astype(np.int64)
        on_device = torch.from_numpy(weights).to(lines.device)
        for top in range(0, len(numbers), height):
            piece = lines[top : top + height, left : left + part]
            total += _block(piece, on_device, numbers[top : top + height])
    return total


def _block(piece: torch.Tensor, weights: torch.Tensor, numbers: Numbers) -> Lanes:
    """One block. |Σ unit · C| stays below 2^63; the product with R wraps mod 2^64, whose low half is what counts."""
    import torch

    unit = torch.uint8 if piece.element_size() == 1 else torch.int16
    values = piece.clone(memory_format=torch.contiguous_format).view(unit).to(torch.int64)
    rows = torch.from_numpy(row_weights(numbers).astype(np.int64)).to(values.device)
    sums = torch.stack([(values * weight).sum(dim=1) for weight in weights])
    lanes = ((sums * rows) & _LOW).sum(dim=1) & _LOW
    return lanes.cpu().numpy().astype(np.uint32)


def _row_numbers(region: Region, shape: tuple[int, ...]) -> Numbers:
    rows = np.zeros(1, dtype=np.int64)
    for span, size in zip(region[:-1], shape[:-1], strict=True):
        positions = span.start + span.step * np.arange(span.count, dtype=np.int64)
        rows = (rows[:, None] * size + positions).reshape(-1)
    return rows
