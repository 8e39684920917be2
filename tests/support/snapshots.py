"""Weights for tests of snapshots: what a label stands for, shared out over ranks, saved and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from liveweight.devices.memory import Memory
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, contiguous_strides, packed
from liveweight.spec.manifest import TensorSpec, Version
from liveweight.spec.region import Region, Span, whole
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, Progress, WriteSettings
from liveweight.transports.snapshot.restore import RestoreResult, restore
from liveweight.transports.snapshot.save import SavedSnapshot, save
from tests.support.layouts import Bytes

SPECS = (
    TensorSpec(name="embed", dtype=DType.BFLOAT16, shape=(96, 64)),
    TensorSpec(name="up", dtype=DType.BFLOAT16, shape=(128, 48)),
    TensorSpec(name="down", dtype=DType.BFLOAT16, shape=(48, 128)),
    TensorSpec(name="norm", dtype=DType.FLOAT32, shape=(48,)),
    TensorSpec(name="flags", dtype=DType.UINT8, shape=(7,)),
    TensorSpec(name="scale", dtype=DType.FLOAT32, shape=()),
)
FULL = packed(SPECS)
SPLIT_AXIS = {"embed": 0, "up": 0, "down": 1}
SETTINGS = WriteSettings(part_bytes=12_300, block_bytes=2048)
"""Small enough that there are several parts, and several blocks of a tensor."""


def weights(label: int) -> Bytes:
    """The memory of FULL that a label stands for."""
    rng = np.random.default_rng(label)
    return rng.integers(0, 256, FULL.memories_bytes[0], dtype=np.uint8)


def region(spec: TensorSpec, rank: int, world: int) -> Region:
    """What a rank of a tensor-parallel engine holds of a tensor."""
    axis = SPLIT_AXIS.get(spec.name)
    spans = list(whole(spec.shape))
    if axis is not None:
        share = spec.shape[axis] // world
        spans[axis] = Span(rank * share, share)
    return tuple(spans)


def sharded(rank: int, world: int) -> Layout:
    """A rank's regions, where they lie in the memory of FULL."""
    return Layout(
        tensors=SPECS,
        memories_bytes=FULL.memories_bytes,
        placements=tuple(
            _seat(placement, region(FULL.specs()[placement.name], rank, world))
            for placement in FULL.placements
        ),
    )


def _seat(placement: Placement, part: Region) -> Placement:
    spec = FULL.specs()[placement.name]
    strides = contiguous_strides(spec.shape, spec.dtype)
    start = sum(span.start * stride for span, stride in zip(part, strides, strict=True))
    return Placement(
        name=placement.name,
        region=part,
        memory=0,
        offset_bytes=placement.offset_bytes + start,
        strides_bytes=strides,
    )


def save_label(
    store: Store,
    label: int,
    *,
    world: int = 1,
    settings: WriteSettings = SETTINGS,
    progress: Progress = lambda _: None,
) -> Path:
    """A complete snapshot of a label, by so many ranks."""
    memory = Memory.from_array(weights(label))
    images = [Image(layout=sharded(rank, world), memories=[memory]) for rank in range(world)]
    version = Version(run="test", label=label)
    saved = save(store, version, images, settings=settings, progress=progress)
    assert isinstance(saved, SavedSnapshot)
    return saved.path


def restored(directory: Path, *, world: int = 1) -> tuple[Bytes, list[RestoreResult]]:
    """What so many ranks get back, put together; padding is zero."""
    memory = np.zeros(FULL.memories_bytes[0], dtype=np.uint8)
    reports = []
    for rank in range(world):
        report = restore(directory, sharded(rank, world), [Memory.from_array(memory)], shared=None)
        assert isinstance(report, RestoreResult)
        reports.append(report)
    return memory, reports


def same(found: Bytes, wanted: Bytes) -> bool:
    """Whether all tensors of FULL are the same; padding does not matter."""
    specs = FULL.specs()
    return all(
        np.array_equal(found[part], wanted[part])
        for part in (
            slice(p.offset_bytes, p.offset_bytes + specs[p.name].size_bytes) for p in FULL.placements
        )
    )
