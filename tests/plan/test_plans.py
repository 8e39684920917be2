"""Plans, executed literally on NumPy arrays, give what slicing the full tensors gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan import copies, digests
from liveweight.plan.buckets import layer_order, plan_buckets
from liveweight.plan.copies import CopyPlans, plan_copies
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import SEEDS, Lanes, column_weights, partial, row_weights
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, Placement, contiguous_strides, packed, place
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import box, count, whole
from liveweight.spec.row_table import Table
from tests.support.layouts import Bytes, Full, filled, fulls, placed, regions, tilings, view


def run_copies(rows: Table, sources: list[Bytes], targets: list[Bytes]) -> None:
    """What a copy table says, in the plainest words."""
    for source, at, target, to, outer, oa, ob, inner, ia, ib, chunk in rows.tolist():
        for i in range(outer):
            for j in range(inner):
                a, b = at + i * oa + j * ia, to + i * ob + j * ib
                assert 0 <= a <= a + chunk <= len(sources[source])
                assert 0 <= b <= b + chunk <= len(targets[target])
                targets[target][b : b + chunk] = sources[source][a : a + chunk]


def run_digests(rows: Table, memories: list[Bytes], slots: int) -> Lanes:
    """What a digest table says, unit by unit."""
    out = np.zeros((slots, SEEDS), dtype=np.uint32)
    for (
        memory,
        at,
        row0,
        row_step,
        lines,
        stride,
        column0,
        step,
        columns,
        column_stride,
        item,
        slot,
    ) in rows.tolist():
        size = min(2, item)
        for line in range(lines):
            weight = row_weights(np.array([row0 + line * row_step]))[:, 0]
            for column in range(columns):
                start = at + line * stride + column * column_stride
                units = memories[memory][start : start + item].copy().view("<i2" if size == 2 else "u1")
                numbers = (column0 + column * step) * len(units) + np.arange(len(units))
                sums = (units.astype(np.int64) * column_weights(numbers)).sum(axis=1).astype(np.uint32)
                out[slot] += sums * weight
    return out


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Full], Layout, Layout]:
    """Tensors, a source that tiles them, a target that owns some boxes of them."""
    tensors = {
        name: draw(fulls(name=name, max_side=6)) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]
    }
    tiles = [(t.spec, tile) for t in tensors.values() for tile in draw(tilings(t.spec.shape))]
    copied = [item for item in tiles if draw(st.booleans())] if draw(st.booleans()) else []
    owned = [
        (t.spec, draw(regions(t.spec.shape)))
        for t in tensors.values()
        for _ in range(draw(st.integers(0, 2)))
    ]
    source = draw(placed(draw(st.permutations(tiles + copied))))
    return tensors, source, draw(placed(owned))


@given(scenes(), st.integers(0, 3), st.sampled_from([1, 16, 1 << 20]))
@settings(max_examples=300, deadline=None)
def test_a_copy_plan_fills_a_target_as_slicing_would(
    scene: tuple[dict[str, Full], Layout, Layout], prefer: int, limit: int
) -> None:
    tensors, source, target = scene
    plan = plan_copies(source, target, prefer=prefer)
    memories = [np.zeros(size, dtype=np.uint8) for size in target.memories_bytes]
    run_copies(copies.split(plan.rows, limit), filled(source, tensors), memories)
    for placement in target.placements:
        full = tensors[placement.name]
        if count(placement.region):
            held = view(memories[placement.memory], placement, full.spec.dtype.size_bytes)
            assert np.array_equal(held, full.part(placement.region))
    assert plan.size_bytes == target.placed_bytes


@given(scenes(), st.sampled_from([1, 16, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_a_digest_plan_reads_each_placement_in_full_coordinates(
    scene: tuple[dict[str, Full], Layout, Layout], limit: int
) -> None:
    tensors, layout, _ = scene
    memories = filled(layout, tensors)
    plan = plan_digests(layout)
    assert plan.size_bytes == layout.placed_bytes
    read = run_digests(digests.split(plan.rows, limit), memories, plan.slots)
    for slot, placement in enumerate(layout.placements):
        expected = partial(memories[placement.memory], placement, tensors[placement.name].spec)
        assert np.array_equal(read[slot], expected)


BF16 = DType.BFLOAT16


def test_a_row_parallel_slice_is_one_row_of_long_runs() -> None:
    spec = TensorSpec(name="down", dtype=BF16, shape=(128, 512))
    half = box((0, 128), (256, 512))
    target = _layout(
        place([Piece(tensor=spec, region=half)], memory=0, shape=(128, 256)), [spec], 128 * 256 * 2
    )
    rows = plan_copies(packed([spec]), target).rows
    assert rows.tolist() == [[0, 512, 0, 0, 1, 0, 0, 128, 1024, 512, 512]]


def test_fused_and_stacked_parameters_become_one_run_per_source() -> None:
    q, k = (TensorSpec(name=name, dtype=BF16, shape=(size, 16)) for name, size in (("q", 8), ("k", 4)))
    pieces = [Piece(tensor=q, region=whole(q.shape)), Piece(tensor=k, region=whole(k.shape), at=(8, 0))]
    target = _layout(place(pieces, memory=0, shape=(12, 16)), [q, k], 12 * 16 * 2)
    assert len(plan_copies(packed([q, k]), target).rows) == 2


def test_stacked_experts_declare_their_axes() -> None:
    experts = [TensorSpec(name=f"experts.{i}", dtype=BF16, shape=(3, 5)) for i in range(2)]
    pieces = [
        Piece(tensor=e, region=whole(e.shape), at=(i, 0, 0), axes=(2, 1)) for i, e in enumerate(experts)
    ]
    placements = place(pieces, memory=0, shape=(2, 5, 3))
    assert [p.strides_bytes for p in placements] == [(2, 6), (2, 6)]
    assert [p.offset_bytes for p in placements] == [0, 30]


def test_a_piece_that_does_not_fit_is_refused() -> None:
    spec = TensorSpec(name="w", dtype=BF16, shape=(4, 4))
    with pytest.raises(LayoutInvalid, match="w: does not fit into dimension 0"):
        place([Piece(tensor=spec, region=whole(spec.shape), at=(1, 0))], memory=0, shape=(4, 4))


def test_a_tensor_that_the_source_lacks_or_has_otherwise_is_named() -> None:
    have, want = (TensorSpec(name=name, dtype=BF16, shape=(4,)) for name in ("a", "b"))
    with pytest.raises(ManifestMismatch, match="b missing"):
        plan_copies(packed([have]), packed([want]))
    other = TensorSpec(name="a", dtype=DType.FLOAT32, shape=(4,))
    with pytest.raises(ManifestMismatch, match=r"a expected float32\[4\], offered bfloat16\[4\]"):
        plan_copies(packed([have]), packed([other]))


def test_a_source_that_holds_only_a_part_is_refused() -> None:
    spec = TensorSpec(name="w", dtype=BF16, shape=(4, 4))
    half = place([Piece(tensor=spec, region=box((0, 2), (0, 4)))], memory=0, shape=(2, 4))
    with pytest.raises(LayoutInvalid, match="does not offer all of"):
        plan_copies(_layout(half, [spec], 16), packed([spec]))


def test_tied_names_find_their_tensor_from_either_side() -> None:
    tied = TensorSpec(name="embed", dtype=BF16, shape=(4, 4), aliases=("head",))
    head = TensorSpec(name="head", dtype=BF16, shape=(4, 4))
    assert plan_copies(packed([tied]), packed([head])).size_bytes == 32
    assert plan_copies(packed([head]), packed([tied])).size_bytes == 32


def test_a_plan_is_made_once_per_pair_of_layouts() -> None:
    spec = TensorSpec(name="w", dtype=BF16, shape=(4, 4))
    plans = CopyPlans(keep=1)
    first = plans.get(packed([spec]), packed([spec]))
    assert plans.get(packed([spec]), packed([spec])) is first
    other = packed([TensorSpec(name="w", dtype=BF16, shape=(2, 2))])
    plans.get(other, other)
    assert plans.get(packed([spec]), packed([spec])) is not first


@given(
    st.lists(st.tuples(st.sampled_from(["embed", "layers.{}.w", "layers.{}.b", "norm"]), st.integers(0, 12))),
    st.integers(1, 8),
    st.data(),
)
def test_buckets_carry_every_byte_once_in_layer_order(
    named: list[tuple[str, int]], lines: int, data: st.DataObject
) -> None:
    names = dict.fromkeys(pattern.format(number) for pattern, number in named) or {"w": None}
    manifest = Manifest(
        tensors=tuple(
            TensorSpec(name=name, dtype=DType.UINT8, shape=(data.draw(st.integers(0, 400)),))
            for name in names
        )
    )
    buckets = plan_buckets(manifest, bucket_bytes=64 * lines, alignment_bytes=64)
    assert buckets == plan_buckets(manifest, bucket_bytes=64 * lines, alignment_bytes=64)
    carried: dict[str, int] = {}
    for bucket in buckets:
        assert bucket.size_bytes <= 64 * lines
        ends = 0
        for piece in bucket.slices:
            assert piece.bucket_offset_bytes % 64 == 0
            assert ends <= piece.bucket_offset_bytes
            assert carried.get(piece.name, 0) == piece.tensor_offset_bytes
            ends = piece.bucket_offset_bytes + piece.size_bytes
            carried[piece.name] = carried.get(piece.name, 0) + piece.size_bytes
        assert ends == bucket.size_bytes
    assert carried == {tensor.name: tensor.size_bytes for tensor in manifest}
    assert list(carried) == [tensor.name for tensor in layer_order(manifest)]


def test_layers_come_in_the_order_of_their_numbers() -> None:
    names = ["embed", "layers.10.w", "layers.2.w", "norm", "layers.2.b", "head"]
    manifest = Manifest(tensors=tuple(TensorSpec(name=name, dtype=BF16, shape=(1,)) for name in names))
    ordered = [tensor.name for tensor in layer_order(manifest)]
    assert ordered == ["embed", "layers.2.w", "layers.2.b", "layers.10.w", "norm", "head"]


def _layout(placements: list[Placement], tensors: list[TensorSpec], size_bytes: int) -> Layout:
    return Layout(tensors=tuple(tensors), memories_bytes=(size_bytes,), placements=tuple(placements))


def test_strides_are_row_major() -> None:
    assert contiguous_strides((2, 3, 4), DType.FLOAT32) == (48, 16, 4)
