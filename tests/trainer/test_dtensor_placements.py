"""What a rank holds of a DTensor, compared with torch's own cuts; and which of several owners is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from liveweight.errors import LayoutInvalid, ManifestInvalid, ManifestMismatch
from liveweight.plan.copies import plan_copies
from liveweight.plan.owners import divide
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed, packed_regions
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import box, check_tiling, whole
from liveweight.trainer.sources.dtensor_placements import cuts_of, held
from liveweight.trainer.sources.dtensor_shards import Shards

SHAPES = [(7,), (8, 6), (3, 5), (5, 4, 3), (1, 9), (0, 4)]
PLACEMENTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((3,), [Shard(0)]),
    ((4,), [Shard(-1)]),
    ((2,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    ((3, 2), [_StridedShard(0, split_factor=2), Replicate()]),
]


@pytest.fixture
def ranks_of() -> Iterator[object]:
    """Becomes each rank of a world in turn; nothing is sent."""

    def become(world: int) -> Iterator[int]:
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            try:
                yield rank
            finally:
                dist.destroy_process_group()

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("mesh", "placements"), PLACEMENTS, ids=str)
def test_regions_are_where_torch_puts_the_shards(
    ranks_of: object, mesh: tuple[int, ...], placements: list[Placement]
) -> None:
    tiles: dict[tuple[int, ...], list[object]] = {shape: [] for shape in SHAPES}
    for _ in ranks_of(int(np.prod(mesh))):  # type: ignore[operator]
        meshed = init_device_mesh("cpu", mesh)
        for shape in SHAPES:
            if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
                continue
            full = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
            placed = distribute_tensor(full, meshed, placements, src_data_rank=None)
            cuts = cuts_of("w", placed)
            assert cuts is not None
            for region, index in held(shape, cuts):
                part = full[tuple(slice(s.start, s.start + s.count) for s in region)]
                assert torch.equal(placed.to_local()[index], part)
                tiles[shape].append(region)
    for shape, regions in tiles.items():
        if regions:
            check_tiling("w", regions, shape)  # type: ignore[arg-type]


def test_a_pending_sum_is_refused_by_name(ranks_of: object) -> None:
    for _ in ranks_of(2):  # type: ignore[operator]
        mesh = init_device_mesh("cpu", (2,))
        placed = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(ManifestInvalid, match=r"w is placed as .*Partial.*redistribute"):
            Shards({"w": placed})


def test_tied_shards_are_one_tensor_also_where_a_rank_has_none_of_it(ranks_of: object) -> None:
    for rank in ranks_of(3):  # type: ignore[operator]
        mesh = init_device_mesh("cpu", (3,))
        placed = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)], src_data_rank=None)
        (spec,) = Shards({"embed": placed, "head": placed}).specs
        assert (spec.names, spec.shape) == (("embed", "head"), (2, 4)), rank


def test_a_tensor_that_is_placed_otherwise_later_is_refused(ranks_of: object) -> None:
    for _ in ranks_of(2):  # type: ignore[operator]
        mesh = init_device_mesh("cpu", (2,))
        tensors = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)}
        shards = Shards(tensors)
        tensors["w"] = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None)
        with pytest.raises(ManifestInvalid, match="w is placed otherwise"):
            shards.locals()


SPEC = TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(8, 6))


def layout(*regions: object) -> Layout:
    return packed_regions([(SPEC, region) for region in regions])  # type: ignore[misc]


@settings(deadline=None)
@given(
    rows=st.integers(1, 8), target_rows=st.integers(0, 8), copies=st.integers(1, 3), prefer=st.integers(0, 9)
)
def test_every_element_of_a_target_comes_from_one_owner(
    rows: int, target_rows: int, copies: int, prefer: int
) -> None:
    cuts = [(at, min(8, at + rows)) for at in range(0, 8, rows)]
    sources = [layout(box(cut, (0, 6))) for cut in cuts for _ in range(copies)]
    target = packed_regions([(SPEC, box((0, target_rows), (1, 5))), (SPEC, whole(SPEC.shape))])
    parts = divide(target, sources, prefer=prefer)
    moved = sum(
        plan_copies(source, part).size_bytes
        for source, part in zip(sources, parts, strict=True)
        if part is not None
    )
    assert moved == target.placed_bytes


def test_a_reader_spreads_over_the_copies() -> None:
    sources = [packed([TensorSpec(name=str(n), dtype=DType.FLOAT32, shape=(4, 4)) for n in range(8)])] * 4
    for prefer in range(4):
        parts = divide(sources[0], sources, prefer=prefer)
        assert [None if part is None else part.placed_bytes for part in parts] == [128] * 4


def test_what_no_source_has_is_refused_by_name() -> None:
    with pytest.raises(LayoutInvalid, match=r"w: the sources do not offer all of \[0:8, 0:6\]"):
        divide(packed([SPEC]), [layout(box((0, 4), (0, 6)))])
    with pytest.raises(LayoutInvalid, match="more than once"):
        divide(packed([SPEC]), [layout(box((0, 5), (0, 6))), layout(box((4, 8), (0, 6)))])
    with pytest.raises(ManifestMismatch, match="v missing"):
        divide(packed([TensorSpec(name="v", dtype=DType.FLOAT32, shape=(2,))]), [packed([SPEC])])
