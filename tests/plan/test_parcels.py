"""Parcels: any target is filled out of buckets of any size, whatever the source's storage; and covers count every element once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid
from liveweight.plan.parcel_covers import covers
from liveweight.plan.parcels import ParcelPlan, cut_out, plan_parcels
from liveweight.plan.unpacking import plan_unpacking
from liveweight.spec.digest import digest_array, to_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import count, whole
from liveweight.transports.ipc.ring_arena import sum_of
from liveweight.transports.ipc.ring_packing import BucketPacking, digests_of
from liveweight.transports.ipc.ring_reader import BoundUnpacking, RingBinding
from liveweight.transports.packing_source import PackingSource, RingSettings
from tests.support.layouts import Full, filled, fulls, placed, tilings, view

KERNELS = choose_kernels()


@st.composite
def split_tensors(draw: st.DrawFn) -> tuple[dict[str, Full], Layout, list[Layout]]:
    """Tensors, a source that tiles them in any storage, and ranks of two replicas that tile them otherwise."""
    tensors = {name: draw(fulls(name=name, max_side=6)) for name in "ab"}
    tiles = [(t.spec, tile) for t in tensors.values() for tile in draw(tilings(t.spec.shape))]
    replicas = [
        [(t.spec, tile) for t in tensors.values() for tile in draw(tilings(t.spec.shape))] for _ in range(2)
    ]
    ranks = []
    for owned in replicas:
        cut = draw(st.integers(0, len(owned)))
        ranks += [draw(placed(owned[:cut])), draw(placed(owned[cut:]))]
    return tensors, draw(placed(draw(st.permutations(tiles)))), ranks


@given(scene=split_tensors(), bucket_bytes=st.sampled_from([64, 128, 4096]))
@settings(max_examples=90, deadline=None)
def test_ranks_get_their_regions_and_the_digests_of_whole_tensors_add_up(
    scene: tuple[dict[str, Full], Layout, list[Layout]], bucket_bytes: int
) -> None:
    assert_packed(*scene, bucket_bytes)


def binding_of(plan: ParcelPlan, segment: Memory, shadow: Sequence[npt.NDArray[np.uint8]]) -> RingBinding:
    """What a rank runs, out of a ring of one segment."""
    tables, targets = plan_unpacking(plan), [Memory.from_array(content) for content in shadow]
    bound = BoundUnpacking(
        moves=KERNELS.bind_freeze(tables.moves.rows, [segment], targets, tables.slots),
        reads=KERNELS.bind_digest(tables.reads.rows, [segment], tables.slots),
        copies=KERNELS.bind_copy(tables.copies.rows, [segment], targets),
    )
    starts = np.flatnonzero(np.diff(plan.rows[:, 0], prepend=-1))
    return RingBinding(
        stream=plan.stream, rows=plan.rows, starts=starts, unpacking=tables, bind=lambda _: bound
    )


def assert_packed(tensors: dict[str, Full], source: Layout, ranks: list[Layout], bucket_bytes: int) -> None:
    memories = [Memory.from_array(content) for content in filled(source, tensors)]
    packing_source = PackingSource(offered=source, held=source, memories=memories, kernels=KERNELS)
    segment = Memory.from_array(np.zeros(bucket_bytes, dtype=np.uint8))
    packings = []
    for target in ranks:
        plan = plan_parcels(source, target, bucket_bytes)
        assert max(plan.stream.memories_bytes, default=0) <= bucket_bytes
        packing = BucketPacking(packing_source, plan.stream, [segment])
        shadow = [np.zeros(size, dtype=np.uint8) for size in target.memories_bytes]
        binding = binding_of(plan, segment, shadow)
        for bucket in range(packing.buckets):
            size, checksum = packing.pack(bucket, 0)
            assert size == plan.stream.memories_bytes[bucket]
            assert sum_of(binding.unpack(0, bucket)) == checksum
        for placement in target.placements:
            full = tensors[placement.name]
            if count(placement.region):
                held = view(shadow[placement.memory], placement, full.spec.dtype.size_bytes)
                assert np.array_equal(held, full.part(placement.region))
        packings.append(packing)
    masks = covers([packing.stream for packing in packings])
    lanes = digests_of(packing_source, packings, masks, bucket_bytes)
    for spec, lane in zip(source.tensors, lanes, strict=True):
        raw = np.ascontiguousarray(tensors[spec.name].raw)
        assert to_hex(lane) == digest_array(raw.reshape(-1).view(np.uint8), spec.dtype, spec.shape)


def test_a_tensor_larger_than_a_bucket_is_cut_and_fills_each() -> None:
    spec = TensorSpec(name="w", dtype=DType.FLOAT32, shape=(3, 1000))
    stream = plan_parcels(packed([spec]), packed([spec]), 1024).stream
    assert len(stream.memories_bytes) == 12
    assert sum(count(parcel.region) for parcel in stream.placements) == 3000


def test_parcels_that_the_source_does_not_hold_are_refused_by_name() -> None:
    spec = TensorSpec(name="w", dtype=DType.FLOAT32, shape=(4, 4))
    other = TensorSpec(name="v", dtype=DType.FLOAT32, shape=(4, 4))
    with pytest.raises(LayoutInvalid, match="v: the source does not hold"):
        cut_out(packed([spec]), packed([other]))


@pytest.mark.parametrize(("size", "segments"), [(1 << 20, 1), (4096, 4), (0, 2)])
def test_a_ring_that_is_none_is_refused(size: int, segments: int) -> None:
    with pytest.raises(ValueError, match="a ring of"):
        RingSettings(size_bytes=size, segments=segments)


def test_a_bit_that_changes_in_any_parcel_of_a_bucket_changes_its_checksum_and_so_does_an_exchange_of_two() -> (
    None
):
    specs = [TensorSpec(name=name, dtype=DType.INT16, shape=(2, 3)) for name in "abc"]
    layout = packed(specs)
    content = np.arange(layout.memories_bytes[0], dtype=np.uint8)
    packing_source = PackingSource(
        offered=layout, held=layout, memories=[Memory.from_array(content)], kernels=KERNELS
    )
    plan = plan_parcels(layout, layout, 4096)
    segment = Memory.from_array(np.zeros(4096, dtype=np.uint8))
    shadow = [np.zeros(size, dtype=np.uint8) for size in layout.memories_bytes]
    binding, packing = (
        binding_of(plan, segment, shadow),
        BucketPacking(packing_source, plan.stream, [segment]),
    )
    _, checksum = packing.pack(0, 0)
    assert sum_of(binding.unpack(0, 0)) == checksum
    held = segment.bytes()
    for parcel in plan.stream.placements:
        for at in range(parcel.offset_bytes, parcel.offset_bytes + 12):
            held[at] ^= 1
            assert sum_of(binding.unpack(0, 0)) != checksum, (parcel.name, at)
            held[at] ^= 1
    first, second = (parcel.offset_bytes for parcel in plan.stream.placements[:2])
    held[first : first + 12], held[second : second + 12] = (
        held[second : second + 12].copy(),
        held[first : first + 12].copy(),
    )
    assert sum_of(binding.unpack(0, 0)) != checksum


def test_a_parcel_that_has_two_homes_or_one_of_other_strides_reaches_all_and_is_digested_once() -> None:
    spec = TensorSpec(name="w", dtype=DType.FLOAT32, shape=(3, 4))
    lines = Placement(name="w", region=whole(spec.shape), memory=0, offset_bytes=0, strides_bytes=(16, 4))
    columns = Placement(name="w", region=whole(spec.shape), memory=1, offset_bytes=0, strides_bytes=(4, 12))
    source, target = (
        packed([spec]),
        Layout(tensors=(spec,), memories_bytes=(48, 48), placements=(columns, lines)),
    )
    across = Layout(tensors=(spec,), memories_bytes=(0, 48), placements=(columns,))
    both, transposed = (
        plan_unpacking(plan_parcels(source, target, 4096)),
        plan_unpacking(plan_parcels(source, across, 4096)),
    )
    assert (len(both.moves.rows), len(both.reads.rows), len(both.copies.rows)) == (1, 0, 1)
    assert (len(transposed.moves.rows), len(transposed.reads.rows), len(transposed.copies.rows)) == (0, 1, 1)
