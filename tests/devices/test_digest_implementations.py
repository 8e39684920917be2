"""Every implementation of the digest gives the reference's bits: C with and without vectors, NumPy, torch; whatever the layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.kernels import Kernels, Table
from liveweight.devices.memory import Memory
from liveweight.devices.native_kernels import NativeKernels
from liveweight.devices.numpy_kernels import NumpyKernels
from liveweight.devices.torch_digest import digest_tensor
from liveweight.devices.torch_kernels import TorchKernels
from liveweight.plan.digests import plan_digests, split
from liveweight.spec.digest import SEEDS, Lanes, combine, digest_array, from_hex, partial
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Span, whole
from tests.support.layouts import Bytes, filled, fulls, placed, regions, tilings

KERNELS: dict[str, Kernels] = {
    "native": NativeKernels(),
    "portable": NativeKernels(portable=True),
    "numpy": NumpyKernels(),
    "torch": TorchKernels("cpu"),
}
each_kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)


def digest(kernels: Kernels, rows: Table, memories: list[Bytes], slots: int) -> Lanes:
    bound = kernels.bind_digest(rows, [Memory.from_array(memory) for memory in memories], slots)
    return bound.run(0, len(rows))


def reference(layout: Layout, memories: list[Bytes]) -> Lanes:
    specs = layout.specs()
    lanes = [partial(memories[p.memory], p, specs[p.name]) for p in layout.placements]
    return np.array(lanes, dtype=np.uint32).reshape(-1, SEEDS)


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


def torch_view(memory: Bytes, placement: Placement, spec: TensorSpec) -> torch.Tensor:
    """The placement as a strided view; torch wants strides in elements and aligned storage, so each is copied to its place."""
    item = spec.dtype.size_bytes
    shape = tuple(span.count for span in placement.region)
    raw = np.ndarray(
        (*shape, item), np.uint8, memory.data, placement.offset_bytes, (*placement.strides_bytes, 1)
    )
    order = sorted(range(len(shape)), key=lambda axis: -placement.strides_bytes[axis])
    stored = torch.from_numpy(np.ascontiguousarray(raw.transpose(*order, len(shape))).reshape(-1))
    tensor = stored.view(torch_dtype(spec.dtype)).view(tuple(shape[axis] for axis in order))
    return tensor.permute(*np.argsort(order).tolist()) if shape else tensor.reshape(())


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_all_implementations_agree_on_random_placements(data: st.DataObject) -> None:
    tensors = [data.draw(fulls(f"t{i}", max_side=12)) for i in range(data.draw(st.integers(1, 3)))]
    items = [(full.spec, data.draw(regions(full.spec.shape))) for full in tensors for _ in range(2)]
    layout = data.draw(placed(items))
    memories = filled(layout, {full.spec.name: full for full in tensors})
    expected = reference(layout, memories)
    plan = plan_digests(layout)
    rows = split(plan.rows, data.draw(st.integers(1, 200)))
    for kernels in KERNELS.values():
        np.testing.assert_array_equal(digest(kernels, rows, memories, plan.slots), expected)
    specs = layout.specs()
    for placement, lanes in zip(layout.placements, expected, strict=True):
        if 0 in placement.strides_bytes or not all(span.count for span in placement.region):
            continue
        view = torch_view(memories[placement.memory], placement, specs[placement.name])
        block = data.draw(st.sampled_from([1, 7, 64, 1 << 20]))
        got = digest_tensor(view, placement.region, specs[placement.name], block_units=block)
        np.testing.assert_array_equal(got, lanes)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_sums_over_any_partition_equal_the_whole(data: st.DataObject) -> None:
    full = data.draw(fulls(max_side=9))
    tiles = data.draw(tilings(full.spec.shape))
    layout = data.draw(placed([(full.spec, tile) for tile in tiles]))
    memories = filled(layout, {"w": full})
    plan = plan_digests(layout)
    expected = from_hex(digest_array(full.raw.reshape(-1), full.spec.dtype, full.spec.shape))
    for kernels in KERNELS.values():
        lanes = digest(kernels, plan.rows, memories, plan.slots)
        parts = zip((p.region for p in layout.placements), lanes, strict=True)
        np.testing.assert_array_equal(combine(parts), expected)


@given(
    item=st.sampled_from([1, 2, 4, 8]),
    rows=st.integers(0, 70),
    columns=st.integers(0, 300),
    gaps=st.tuples(st.integers(0, 20), st.integers(0, 3)),
    transposed=st.booleans(),
    starts=st.tuples(st.integers(0, 40), st.integers(0, 5000)),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    offset=st.integers(0, 67),
)
@settings(max_examples=400, deadline=None)
def test_wide_rectangles_agree_at_any_alignment(
    item: int,
    rows: int,
    columns: int,
    gaps: tuple[int, int],
    transposed: bool,
    starts: tuple[int, int],
    steps: tuple[int, int],
    offset: int,
) -> None:
    short = item + gaps[1] * (gaps[0] % 2)
    long = short * (rows if transposed else columns) + gaps[0]
    row_stride, column_stride = (short, long) if transposed else (long, short)
    dtype = {1: DType.INT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}[item]
    region = (Span(starts[0], rows, steps[0]), Span(starts[1], columns, steps[1]))
    spec = TensorSpec(name="w", dtype=dtype, shape=(1000, 10000))
    size = offset + rows * row_stride + columns * column_stride + item
    place = Placement(
        name="w", region=region, memory=0, offset_bytes=offset, strides_bytes=(row_stride, column_stride)
    )
    layout = Layout(tensors=(spec,), memories_bytes=(size,), placements=(place,))
    memory = random_bytes(size, seed=rows * 1000 + columns)
    plan = plan_digests(layout)
    expected = reference(layout, [memory])
    for kernels in KERNELS.values():
        np.testing.assert_array_equal(digest(kernels, plan.rows, [memory], 1), expected)


@each_kernels
@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "shape", [(1, 1 << 20), (3, 40_001), (2, (1 << 20) + 77), (3000, 5), (1100, 1), (1, 1)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_beyond_strips_tiles_and_cached_weights_agree(
    kernels: Kernels, item: int, shape: tuple[int, int], transposed: bool
) -> None:
    dtype = {1: DType.UINT8, 2: DType.BFLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}[item]
    spec = TensorSpec(name="w", dtype=dtype, shape=shape)
    strides = (item, shape[0] * item) if transposed else (shape[1] * item, item)
    place = Placement(name="w", region=whole(shape), memory=0, offset_bytes=0, strides_bytes=strides)
    layout = Layout(tensors=(spec,), memories_bytes=(spec.size_bytes,), placements=(place,))
    memory = random_bytes(spec.size_bytes)
    rows = plan_digests(layout).rows
    np.testing.assert_array_equal(digest(kernels, rows, [memory], 1), reference(layout, [memory]))


@each_kernels
@pytest.mark.parametrize("start", [(1 << 20) - 40, (1 << 20) - 1, 1 << 20, 1 << 33])
def test_columns_far_out_agree(kernels: Kernels, start: int) -> None:
    shape = (1 << 20, 1 << 34)
    spec = TensorSpec(name="w", dtype=DType.BFLOAT16, shape=shape)
    region = (Span(1 << 19, 5), Span(start, 50, 3))
    place = Placement(name="w", region=region, memory=0, offset_bytes=0, strides_bytes=(100, 2))
    layout = Layout(tensors=(spec,), memories_bytes=(500,), placements=(place,))
    memory = random_bytes(500)
    np.testing.assert_array_equal(
        digest(kernels, plan_digests(layout).rows, [memory], 1), reference(layout, [memory])
    )


@each_kernels
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_extreme_units_do_not_overflow(kernels: Kernels, fill: int) -> None:
    for dtype in (DType.UINT8, DType.INT16, DType.FLOAT32, DType.INT64):
        spec = TensorSpec(name="w", dtype=dtype, shape=(33, 5000))
        memory = np.full(spec.size_bytes, fill, dtype=np.uint8)
        layout = packed([spec])
        memory = np.resize(memory, layout.memories_bytes[0])
        np.testing.assert_array_equal(
            digest(kernels, plan_digests(layout).rows, [memory], 1), reference(layout, [memory])
        )


GOLDEN = {
    "bool": "dcf4476a56133834605e984e6ab9e39a",
    "uint8": "79a46ff0933ce4427898d1e4cbfa29e8",
    "bfloat16": "e5b452e3c2a109c1cc9da08d25cfa875",
    "float32": "4d27d9344a3d0496b98ecdfada519d10",
    "float64": "d9405688e01e4f5a9d1426ca2b3f8b7a",
}
"""Digests of `golden_content`. They are what is sent and compared between releases: they never change."""


def golden_content(dtype: DType) -> Bytes:
    """37 x 101 elements whose bytes are 7·i + i//256 mod 256 (mod 2 for bool)."""
    index = np.arange(37 * 101 * dtype.size_bytes, dtype=np.int64)
    values = (7 * index + index // 256) % (2 if dtype is DType.BOOL else 256)
    return values.astype(np.uint8)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_digests_never_change(name: str) -> None:
    dtype = DType(name)
    assert digest_array(golden_content(dtype), dtype, (37, 101)) == GOLDEN[name]


@each_kernels
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_kernels_give_the_golden_digests(kernels: Kernels, name: str) -> None:
    dtype = DType(name)
    layout = packed([TensorSpec(name="w", dtype=dtype, shape=(37, 101))])
    memory = np.resize(golden_content(dtype), layout.memories_bytes[0])
    lanes = digest(kernels, plan_digests(layout).rows, [memory], 1)
    np.testing.assert_array_equal(lanes[0], from_hex(GOLDEN[name]))


def test_torch_gives_the_golden_digest_of_a_transposed_parameter() -> None:
    spec = TensorSpec(name="w", dtype=DType.BFLOAT16, shape=(37, 101))
    raw: npt.NDArray[np.int16] = golden_content(spec.dtype).view(np.int16).reshape(37, 101)
    stored = torch.from_numpy(np.ascontiguousarray(raw.T)).view(torch.bfloat16)
    lanes = digest_tensor(stored.T, whole(spec.shape), spec)
    np.testing.assert_array_equal(lanes, from_hex(GOLDEN["bfloat16"]))
