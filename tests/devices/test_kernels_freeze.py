"""Freezing: copied or cast, and digested as the target would be. Against plain copies, torch's casts and the reference digest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.devices.native_kernels import NativeKernels
from liveweight.devices.numpy_kernels import NumpyKernels
from liveweight.devices.torch_kernels import TorchKernels
from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan.freezes import plan_freeze, row_bytes, split
from liveweight.spec.digest import SEEDS, Lanes, partial
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement, contiguous_strides, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import whole
from tests.support.layouts import Bytes, Full, filled, fulls, placed, regions

KERNELS: dict[str, Kernels] = {
    "native": NativeKernels(),
    "portable": NativeKernels(portable=True),
    "numpy": NumpyKernels(),
    "torch": TorchKernels("cpu"),
}
each_kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)

SPECIAL = np.array(
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000),  # zeros, infinities
        *(0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0x7FC00000),  # NaNs
        *(0x00000001, 0x007FFFFF, 0x80000001, 0x00008000, 0x00018000),  # denormals
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF),  # rounds to infinity, or not
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF),  # ties of bfloat16
        *(0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF),  # ties of float16
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0xC77FF000),  # the end of float16
        *(0x38800000, 0x387FFFFF, 0x387FE000, 0x387FF000),  # its smallest normal
        *(
            0x33800000,
            0x33000000,
            0x33000001,
            0x32FFFFFF,
            0x33C00000,
            0x34200000,
            0xB3000001,
        ),  # its denormals
    ],
    dtype=np.uint32,
)


def frozen(
    kernels: Kernels, source: Layout, memories: list[Bytes], target: Layout, cut: int
) -> tuple[list[Bytes], Lanes]:
    """What a freeze leaves in the target, and its digests; moving alone leaves the same."""
    plan = plan_freeze(source, target)
    rows = split(plan.rows, cut)
    assert row_bytes(rows).sum() == plan.size_bytes
    results = []
    for digests in (True, False):
        into = [np.full(size, 0xA5, dtype=np.uint8) for size in target.memories_bytes]
        bound = kernels.bind_freeze(
            rows, [Memory.from_array(m) for m in memories], [Memory.from_array(m) for m in into], plan.slots
        )
        if digests:
            lanes = bound.run(0, len(rows))
        else:
            bound.move(0, len(rows))
        results.append(into)
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    return results[0], lanes


def reference(layout: Layout, memories: list[Bytes]) -> Lanes:
    specs = layout.specs()
    lanes = [partial(memories[p.memory], p, specs[p.name]) for p in layout.placements]
    return np.array(lanes, dtype=np.uint32).reshape(-1, SEEDS)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_freeze_copies_any_placement_and_digests_it(data: st.DataObject) -> None:
    tensors = [data.draw(fulls(f"t{i}", max_side=9)) for i in range(2)]
    by_name = {full.spec.name: full for full in tensors}
    source = data.draw(placed([(full.spec, whole(full.spec.shape)) for full in tensors]))
    target = packed([full.spec for full in tensors], alignment_bytes=data.draw(st.sampled_from([1, 8, 64])))
    memories, expected = filled(source, by_name), filled(target, by_name)
    for kernels in KERNELS.values():
        into, lanes = frozen(kernels, source, memories, target, data.draw(st.integers(1, 500)))
        np.testing.assert_array_equal(lanes, reference(target, expected))
        for placement in target.placements:
            size = by_name[placement.name].spec.size_bytes
            part = slice(placement.offset_bytes, placement.offset_bytes + size)
            np.testing.assert_array_equal(into[0][part], expected[0][part])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_freeze_of_a_shard_has_the_full_tensors_coordinates(data: st.DataObject) -> None:
    full = data.draw(fulls(max_side=9))
    region = data.draw(regions(full.spec.shape))
    source = data.draw(placed([(full.spec, region)]))
    shape = tuple(span.count for span in region)
    strides, size = (
        contiguous_strides(shape, full.spec.dtype),
        int(np.prod(shape)) * full.spec.dtype.size_bytes,
    )
    place = Placement(name="w", region=region, memory=0, offset_bytes=0, strides_bytes=strides)
    target = Layout(tensors=(full.spec,), memories_bytes=(size,), placements=(place,))
    memories = filled(source, {"w": full})
    expected = reference(target, filled(target, {"w": full}))
    for kernels in KERNELS.values():
        np.testing.assert_array_equal(frozen(kernels, source, memories, target, 100)[1], expected)


def floats(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint32]:
    """Any bit patterns, special values among them."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    near = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    kind = rng.integers(0, 3, shape)
    return np.where(kind == 0, values, np.where(kind == 1, near, rng.choice(SPECIAL, shape)))


def torch_cast(bits: npt.NDArray[np.uint32], dtype: DType) -> npt.NDArray[np.uint16]:
    """What torch makes of them, NaNs made quiet and equal."""
    source = torch.from_numpy(bits.view(np.float32).copy())
    cast = source.to(torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float16)
    raw: npt.NDArray[np.uint16] = cast.view(torch.int16).numpy().view(np.uint16).copy()
    raw[np.isnan(bits.view(np.float32))] = 0x7FC0 if dtype is DType.BFLOAT16 else 0x7E00
    return raw


def strided(spec: TensorSpec, bits: npt.NDArray[np.uint32], kind: str, offset: int) -> tuple[Layout, Bytes]:
    """A float32 matrix in memory: row by row, with gaps, or column by column."""
    rows, columns = bits.shape
    strides = {
        "rows": (columns * 4, 4),
        "gaps": (columns * 4 + 12, 4),
        "turned": (4, rows * 4),
        "sparse": (columns * 8, 8),
    }[kind]
    size = offset + rows * strides[0] + columns * strides[1] + 4
    place = Placement(
        name="w", region=whole(spec.shape), memory=0, offset_bytes=offset, strides_bytes=strides
    )
    memory = np.zeros(size, dtype=np.uint8)
    np.ndarray(bits.shape, np.uint32, memory.data, offset, strides)[...] = bits
    return Layout(tensors=(spec,), memories_bytes=(size,), placements=(place,)), memory


@each_kernels
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("kind", ["rows", "gaps", "turned", "sparse"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 64), (70, 33), (2, 5000), (300, 1024)])
@pytest.mark.parametrize("offset", [0, 1, 20])
def test_a_cast_rounds_like_torch_and_digests_what_it_wrote(
    kernels: Kernels, dtype: DType, kind: str, shape: tuple[int, int], offset: int
) -> None:
    bits = floats(shape, seed=shape[1] + offset)
    source, memory = strided(TensorSpec(name="w", dtype=DType.FLOAT32, shape=shape), bits, kind, offset)
    target = packed([TensorSpec(name="w", dtype=dtype, shape=shape)])
    into, lanes = frozen(kernels, source, [memory], target, 1 << 30)
    got = into[0][: bits.size * 2].view(np.uint16).reshape(shape)
    np.testing.assert_array_equal(got, torch_cast(bits, dtype))
    np.testing.assert_array_equal(lanes, reference(target, into))


@each_kernels
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_special_values_are_cast_as_ieee_says(kernels: Kernels, dtype: DType) -> None:
    bits = SPECIAL.reshape(1, -1)
    source, memory = strided(TensorSpec(name="w", dtype=DType.FLOAT32, shape=bits.shape), bits, "rows", 0)
    target = packed([TensorSpec(name="w", dtype=dtype, shape=bits.shape)])
    into, _ = frozen(kernels, source, [memory], target, 1 << 30)
    got = into[0][: bits.size * 2].view(np.uint16)
    np.testing.assert_array_equal(got, torch_cast(bits, dtype)[0])


def test_every_half_that_a_rounding_can_reach_is_reached_alike() -> None:
    """All upper halves with lower halves around the ties: C, NumPy and torch agree, in float16 and bfloat16."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate(
        [upper | low for low in (0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    )
    bits = bits.reshape(1 << 9, -1)
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        source, memory = strided(TensorSpec(name="w", dtype=DType.FLOAT32, shape=bits.shape), bits, "rows", 0)
        target = packed([TensorSpec(name="w", dtype=dtype, shape=bits.shape)])
        for kernels in KERNELS.values():
            into, _ = frozen(kernels, source, [memory], target, 1 << 20)
            np.testing.assert_array_equal(
                into[0].view(np.uint16).reshape(bits.shape), torch_cast(bits, dtype)
            )


@each_kernels
@pytest.mark.parametrize("shift", [0, 1, 2, 30, 32, 33, 64])
@pytest.mark.parametrize(("item", "columns"), [(1, 3001), (2, 2048), (2, 2049), (4, 1025), (8, 515)])
def test_large_targets_at_any_alignment_are_written_whole(
    kernels: Kernels, shift: int, item: int, columns: int
) -> None:
    """Beyond the size from which lines are written past the caches."""
    dtype = {1: DType.UINT8, 2: DType.BFLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}[item]
    spec = TensorSpec(name="w", dtype=dtype, shape=(201, columns))
    raw = np.random.default_rng(columns).integers(0, 256, (201, columns, item), dtype=np.uint8)
    full = Full(spec=spec, raw=raw)
    place = packed([spec]).placements[0]
    moved = Placement(
        name="w", region=place.region, memory=0, offset_bytes=shift, strides_bytes=place.strides_bytes
    )
    size = shift + spec.size_bytes + 3
    target = Layout(tensors=(spec,), memories_bytes=(size,), placements=(moved,))
    source = packed([spec])
    into, lanes = frozen(kernels, source, filled(source, {"w": full}), target, 1 << 30)
    np.testing.assert_array_equal(into[0][shift : shift + spec.size_bytes], full.raw.reshape(-1))
    assert (into[0][:shift] == 0xA5).all()
    assert (into[0][-3:] == 0xA5).all()
    np.testing.assert_array_equal(lanes, reference(target, into))


def spec_of(dtype: DType, shape: tuple[int, ...] = (2, 3), aliases: tuple[str, ...] = ()) -> TensorSpec:
    return TensorSpec(name="w", dtype=dtype, shape=shape, aliases=aliases)


def test_a_freeze_refuses_what_it_cannot_make() -> None:
    source = packed([spec_of(DType.FLOAT32)])
    with pytest.raises(ManifestMismatch, match="float64"):
        plan_freeze(source, packed([spec_of(DType.FLOAT64)]))
    with pytest.raises(ManifestMismatch, match=r"\[3, 2\]"):
        plan_freeze(source, packed([spec_of(DType.FLOAT32, (3, 2))]))
    with pytest.raises(ManifestMismatch, match="v missing"):
        plan_freeze(source, packed([TensorSpec(name="v", dtype=DType.FLOAT32, shape=(2, 3))]))
    turned = Placement(name="w", region=whole((2, 3)), memory=0, offset_bytes=0, strides_bytes=(4, 8))
    with pytest.raises(LayoutInvalid, match="not contiguous"):
        plan_freeze(source, Layout(tensors=source.tensors, memories_bytes=(24,), placements=(turned,)))
    nothing = Layout(tensors=source.tensors, memories_bytes=(), placements=())
    with pytest.raises(LayoutInvalid, match="no placement"):
        plan_freeze(nothing, source)


def test_a_tied_tensor_is_found_by_any_of_its_names() -> None:
    source = packed([spec_of(DType.FLOAT32, aliases=("head",))])
    wanted = TensorSpec(name="head", dtype=DType.BFLOAT16, shape=(2, 3), aliases=("w",))
    assert plan_freeze(source, packed([wanted])).size_bytes == 12
