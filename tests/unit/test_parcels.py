"""Parcels: any target is filled out of buckets of any size, whatever the source's storage; and covers count every element once."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid
from liveweight.plan import parcels
from liveweight.plan.cover import covers
from liveweight.plan.parcels import cut_out, in_blocks, plan_parcels
from liveweight.spec.digest import digest_array, to_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import count
from liveweight.transports.ipc import ring_packing
from liveweight.transports.ipc.ring_packing import Packing, digests_of
from liveweight.transports.stock import RingSettings, Stock
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


@given(
    scene=split_tensors(),
    bucket_bytes=st.sampled_from([64, 128, 4096]),
    block_bytes=st.sampled_from([8, 100, 1 << 20]),
)
@settings(max_examples=90, deadline=None)
def test_ranks_get_their_regions_and_the_digests_of_whole_tensors_add_up(
    scene: tuple[dict[str, Full], Layout, list[Layout]], bucket_bytes: int, block_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parcels, "BLOCK_BYTES", block_bytes)
        patched.setattr(ring_packing, "BLOCK_BYTES", block_bytes)
        assert_packed(*scene, bucket_bytes)


def assert_packed(tensors: dict[str, Full], source: Layout, ranks: list[Layout], bucket_bytes: int) -> None:
    memories = [Memory.from_array(content) for content in filled(source, tensors)]
    stock = Stock(offered=source, held=source, memories=memories, kernels=KERNELS, digest=True)
    segment = Memory.from_array(np.zeros(bucket_bytes, dtype=np.uint8))
    packings = []
    for target in ranks:
        plan = plan_parcels(source, target, bucket_bytes)
        assert max(plan.stream.memories_bytes, default=0) <= bucket_bytes
        packing = Packing(stock, plan.stream, [segment])
        shadow = [np.zeros(size, dtype=np.uint8) for size in target.memories_bytes]
        for bucket in range(packing.buckets):
            size, checksum = packing.pack(bucket, 0)
            assert checksum == xxhash.xxh3_64_intdigest(segment.bytes()[:size].tobytes())
            rows = plan.rows[plan.rows[:, 0] == bucket].copy()
            rows[:, 0] = 0
            KERNELS.bind_copy(rows, [segment], [Memory.from_array(a) for a in shadow]).run(0, len(rows))
        for placement in target.placements:
            full = tensors[placement.name]
            if count(placement.region):
                held = view(shadow[placement.memory], placement, full.spec.dtype.size_bytes)
                assert np.array_equal(held, full.part(placement.region))
        packings.append(packing)
    masks = covers([packing.stream for packing in packings])
    lanes = digests_of(stock, packings, masks, bucket_bytes)
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


def test_blocks_hold_every_row_once_and_say_where_all_of_their_bytes_end() -> None:
    sizes = np.array([600, 600, 10, 2000, 5, 700], dtype=np.int64) << 10
    ends = np.array([600, 1200, 1210, 2000, 5, 705], dtype=np.int64) << 10
    found = in_blocks(np.array([0, 4, 4]), ends, sizes)  # of three buckets the second is empty
    assert found == [[(0, 1, 600 << 10), (1, 3, 1210 << 10), (3, 4, 2000 << 10)], [], [(4, 6, 705 << 10)]]
    assert in_blocks(np.array([], dtype=np.int64), ends[:0], sizes[:0]) == []
