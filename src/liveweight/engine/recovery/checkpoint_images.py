"""Checkpoint images: what each rank of a replica would hold of a checkpoint, to be written as a snapshot without starting ranks.

The files are mapped and nothing is copied. One rank holds everything, whatever the architecture; for several, the embedded engine's own
declarations say which rank has what, so only its architectures can be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from liveweight.checkpoint import CheckpointSource
from liveweight.devices.memory import Memory
from liveweight.engine.models.forward import Solo
from liveweight.engine.models.model import build
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.spec.layout import Layout, Placement, contiguous_strides
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, whole
from liveweight.transports.snapshot.disk.writer import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """A tensor of the checkpoint, and the regions of it that one rank holds."""

    spec: TensorSpec
    regions: tuple[Region, ...]


def checkpoint_images(directory: Path, tp: int) -> list[Image]:
    """One image per rank. ManifestInvalid or CheckpointInvalid for a directory that cannot be read, EngineConfigInvalid where `tp`
    does not divide the model."""
    source = CheckpointSource(directory)
    specs, tensors = source.manifest().tensors, [tensor for _, tensor in source.tensors()]
    memories = [Memory.of_view(tensor, writable=False) for tensor in tensors]
    if tp == 1:
        owned = [[_Owned(spec=spec, regions=(whole(spec.shape),)) for spec in specs]]
    else:
        model = ModelSpec.read(directory)
        owned = [_owned(specs, _declared(model, rank, tp), rank) for rank in range(tp)]
    sizes = tuple(memory.size_bytes for memory in memories)
    return [Image(layout=_layout(own, specs, sizes), memories=memories) for own in owned]


class _RankPosition(Solo):
    """A rank number in a group that never communicates: models are built, and never run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _declared(model: ModelSpec, rank: int, tp: int) -> Mapping[str, tuple[Region, ...]]:
    """The regions that the engine's rank holds of every tensor, by every name. Built without memory."""
    built = build(
        model, _RankPosition(rank, tp), dtype=torch.float32, device="meta", draft=model.draft_layers == 1
    )
    regions: dict[str, list[Region]] = {}
    for declaration in built.declarations().values():
        for spec in declaration.tensors:
            held = regions.setdefault(spec.name, [])
            regions |= dict.fromkeys(spec.aliases, held)
        for piece in declaration.pieces:
            regions[piece.tensor.name].append(piece.region)
    return {name: tuple(boxes) for name, boxes in regions.items()}


def _owned(
    specs: tuple[TensorSpec, ...], declared: Mapping[str, tuple[Region, ...]], rank: int
) -> list[_Owned]:
    """The checkpoint's tensors, under its own names, as the engine splits them; tensors it does not know go to rank 0, whole."""
    owned = []
    for spec in specs:
        known = declared.get(spec.name)
        if known is not None and known:
            owned.append(_Owned(spec=spec, regions=known))
        elif known is None and rank == 0:
            owned.append(_Owned(spec=spec, regions=(whole(spec.shape),)))
    return owned


def _layout(owned: list[_Owned], specs: tuple[TensorSpec, ...], sizes_bytes: tuple[int, ...]) -> Layout:
    """The regions where they lie in the mapped tensors: memory i is the checkpoint's tensor i."""
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    placements = tuple(
        _placement(one.spec, region, numbers[one.spec.name]) for one in owned for region in one.regions
    )
    tensors = tuple(one.spec for one in owned)
    return Layout(tensors=tensors, memories_bytes=sizes_bytes, placements=placements)


def _placement(spec: TensorSpec, region: Region, memory: int) -> Placement:
    strides = contiguous_strides(spec.shape, spec.dtype)
    return Placement(
        name=spec.name,
        region=region,
        memory=memory,
        offset_bytes=sum(span.start * stride for span, stride in zip(region, strides, strict=True)),
        strides_bytes=tuple(span.step * stride for span, stride in zip(region, strides, strict=True)),
    )
