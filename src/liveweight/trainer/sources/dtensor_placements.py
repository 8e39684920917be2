"""What a rank holds of a DTensor: regions of the full tensor, from its placements, and the views of the local tensor that are these.

The cuts are torch's: `Shard` as torch.chunk has it, so that last shards may be smaller or empty; `_StridedShard`, which FSDP2 makes over
tensor parallel shards of the same dimension. Nothing is gathered, nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from liveweight.errors import ManifestInvalid
from liveweight.spec.region import Region, Span, canonical
from liveweight.trainer.sources.tensors import is_distributed

if TYPE_CHECKING:
    import torch

Run: TypeAlias = tuple[int, int]
"""Indices [start, stop) of one dimension."""

Index: TypeAlias = tuple[slice, ...]
"""How a view is taken of a local tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCut:
    """One mesh dimension's cut of a tensor's dimension: into so many parts, of which this rank has one.

    `factor` above 1: it was already cut into so many by a later mesh dimension, and each of these is cut (`_StridedShard`).
    """

    dimension: int
    parts: int
    which: int
    factor: int = 1


def held(shape: Sequence[int], cuts: Sequence[MeshCut]) -> list[tuple[Region, Index]]:
    """The regions that are left after these cuts, in order, each with its place in the local tensor. At least one; it may be empty."""
    axes = []
    for dimension, size in enumerate(shape):
        runs: list[Run] = [(0, size)]
        for cut in cuts:
            if cut.dimension == dimension:
                runs = _cut(runs, cut)
        axes.append(_merged(runs))
    found = []
    for box in itertools.product(*(_placed(runs) for runs in axes)):
        region = canonical([Span(start, stop - start) for (start, stop), _ in box])
        found.append((region, tuple(place for _, place in box)))
    return found


def cuts_of(name: str, tensor: Any) -> list[MeshCut] | None:
    """The cuts that a DTensor's placements make; None where this rank is not of its mesh. Pending sums are refused."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    cuts = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dimension = getattr(placement, "dim", None)
        if dimension is None or placement.is_partial():
            raise ManifestInvalid(
                f"{name} is placed as {placement!r}, which is not yet a value: redistribute it first"
            )
        cuts.append(
            MeshCut(
                dimension=dimension % max(1, tensor.ndim),
                parts=mesh.size(axis),
                which=coordinate[axis],
                factor=int(getattr(placement, "split_factor", 1)),
            )
        )
    return cuts


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies here; any other tensor itself."""
    return tensor.detach().to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _cut(runs: Sequence[Run], cut: MeshCut) -> list[Run]:
    first = [_chunk(runs, cut.factor, number) for number in range(cut.factor)]
    return [run for part in first for run in _chunk(part, cut.parts, cut.which)]


def _chunk(runs: Sequence[Run], parts: int, which: int) -> list[Run]:
    """Part `which` of these indices, cut as torch.chunk does: equal parts, the last ones smaller or empty."""
    size = sum(stop - start for start, stop in runs)
    each = -(-size // parts)
    first, last = min(which * each, size), min((which + 1) * each, size)
    found, before = [], 0
    for start, stop in runs:
        low, high = max(first, before), min(last, before + stop - start)
        if low < high:
            found.append((start + low - before, start + high - before))
        before += stop - start
    return found


def _merged(runs: Sequence[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged or [(0, 0)]


def _placed(runs: Sequence[Run]) -> list[tuple[Run, slice]]:
    """Each run, and where it lies in the local tensor."""
    placed, before = [], 0
    for start, stop in runs:
        placed.append(((start, stop), slice(before, before + stop - start)))
        before += stop - start
    return placed
