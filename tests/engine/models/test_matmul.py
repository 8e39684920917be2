"""The product of activations and weights: every method against float64; bits that stay the same; what is refused; what is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from liveweight.engine import _linear
from liveweight.engine.models import matmul as products
from liveweight.engine.models.matmul import MEMORY_ROWS, MOST_ROWS, native, product

Tensor = torch.Tensor
FLOAT, HALF = torch.float32, torch.bfloat16
each_dtype = pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "bfloat16"])
each_path = pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within what the order of float32 sums, and one rounding to the result's dtype, allow."""
    exact = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    bound = 2**-22 * max(1, x.shape[1]) ** 0.5 * scale
    if found.dtype == HALF:
        bound += 2**-8 * exact.abs()
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= bound).all())


# Against float64.


@each_path
@each_dtype
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 70), inputs=st.integers(0, 90), outputs=st.integers(0, 40), seed=st.integers(0, 9))
def test_it_is_the_product(
    portable: bool, dtype: torch.dtype, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    x, weight = made(rows, inputs, dtype=dtype, seed=seed), made(outputs, inputs, dtype=dtype, seed=seed + 1)
    assert_close(native(x, weight, portable=portable), x, weight)


@each_path
@each_dtype
@pytest.mark.parametrize("rows", range(1, 71))
def test_any_number_of_rows_is_multiplied(portable: bool, dtype: torch.dtype, rows: int) -> None:
    x, weight = made(rows, 131, dtype=dtype), made(29, 131, dtype=dtype, seed=1)
    assert_close(native(x, weight, portable=portable), x, weight)


@each_path
@each_dtype
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 512), (1, 1), (7, 1537), (1024, 512), (515, 2048)])
def test_shapes_of_models_are_multiplied(
    portable: bool, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    for rows in (1, 8, 9, 16, 40):
        x, weight = made(rows, inputs, dtype=dtype), made(outputs, inputs, dtype=dtype, seed=1)
        assert_close(native(x, weight, portable=portable), x, weight)


@each_path
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(FLOAT, HALF), (HALF, FLOAT)])
def test_dtypes_may_differ(portable: bool, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for rows in (3, 20):
        x, weight = made(rows, 77, dtype=x_dtype), made(13, 77, dtype=weight_dtype, seed=1)
        assert_close(native(x, weight, portable=portable), x, weight)


@each_path
@each_dtype
def test_rows_may_lie_apart_or_over_each_other(portable: bool, dtype: torch.dtype) -> None:
    wide, weight = made(33, 200, dtype=dtype), made(19, 66, dtype=dtype, seed=1)
    for x in (wide[:, 7:73], wide[::3, 100:166], wide[:1, :66].expand(18, 66)):
        assert_close(native(x, weight, portable=portable), x, weight)


@each_path
@each_dtype
def test_only_the_result_is_written(portable: bool, dtype: torch.dtype) -> None:
    x, weight, memory = (
        made(18, 50, dtype=dtype),
        made(9, 50, dtype=dtype),
        torch.full((18, 24), 5.0).to(dtype),
    )
    _linear.linear(to_dlpack(x), to_dlpack(weight), to_dlpack(memory[:, 8:17]), portable)
    assert_close(memory[:, 8:17], x, weight)
    assert bool((memory[:, :8] == 5.0).all())
    assert bool((memory[:, 17:] == 5.0).all())


@each_path
@each_dtype
def test_what_is_no_number_stays_in_its_row_and_column(portable: bool, dtype: torch.dtype) -> None:
    x, weight = made(20, 40, dtype=dtype), made(11, 40, dtype=dtype)
    x[3, 5], weight[7, 2] = float("nan"), float("inf")
    found = native(x, weight, portable=portable)
    assert bool(found[3].isnan().all())
    lost = ~found.isfinite()
    lost[3], lost[:, 7] = False, False
    assert not bool(lost.any())


# Bits.


@each_path
@each_dtype
@pytest.mark.parametrize("inputs", [64, 77, 513])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    portable: bool, dtype: torch.dtype, inputs: int
) -> None:
    x, weight = made(70, inputs, dtype=dtype), made(37, inputs, dtype=dtype, seed=1)
    whole = native(x, weight, portable=portable)
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 33, 64):
        for start in range(0, 70 - rows + 1, 5):
            part = native(x[start : start + rows], weight, portable=portable)
            assert torch.equal(part, whole[start : start + rows])


@each_dtype
def test_a_column_has_the_same_bits_in_any_share_of_the_weight(dtype: torch.dtype) -> None:
    weight = made(37, 77, dtype=dtype, seed=1)
    for rows in (3, 20):
        x = made(rows, 77, dtype=dtype)
        whole = native(x, weight)
        for start, stop in ((0, 1), (1, 14), (14, 37), (36, 37)):
            assert torch.equal(native(x, weight[start:stop]), whole[:, start:stop])


# Refusals.


def backwards(*shape: int) -> object:
    return np.ones(shape, np.float32)[::-1, ::-1].__dlpack__()


SHARED = torch.ones(64)
REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "no tensor": (None, made(3, 4), made(2, 3)),
    "an array": (np.ones((2, 4), np.float32), made(3, 4), made(2, 3)),
    "x of one dimension": (made(4), made(3, 4), made(2, 3)),
    "a weight of three dimensions": (made(2, 4), made(1, 3, 4), made(2, 3)),
    "float64": (made(2, 4).double(), made(3, 4), made(2, 3).double()),
    "float16": (made(2, 4), made(3, 4).half(), made(2, 3)),
    "integers": (made(2, 4), made(3, 4).int(), made(2, 3)),
    "16-bit integers": (made(2, 4), made(3, 4).to(torch.int16), made(2, 3)),
    "out of another dtype": (made(2, 4), made(3, 4), made(2, 3, dtype=HALF)),
    "other columns": (made(2, 5), made(3, 4), made(2, 3)),
    "fewer rows of out": (made(2, 4), made(3, 4), made(1, 3)),
    "fewer columns of out": (made(2, 4), made(3, 4), made(2, 2)),
    "out turned": (made(3, 4), made(2, 4), made(2, 3).t()),
    "x turned": (made(4, 2).t(), made(3, 4), made(2, 3)),
    "x backwards": (backwards(2, 4), made(3, 4), made(2, 3)),
    "a weight turned": (made(2, 4), made(4, 3).t(), made(2, 3)),
    "a weight with gaps": (made(2, 4), made(3, 8)[:, :4], made(2, 3)),
    "a weight of one row repeated": (made(2, 4), made(1, 4).expand(3, 4), made(2, 3)),
    "rows of out over each other": (made(2, 4), made(3, 4), made(1, 3).expand(2, 3)),
    "rows of out that overlap": (made(2, 4), made(3, 4), torch.ones(9).as_strided((2, 3), (2, 1))),
    "out over x": (SHARED[:8].view(2, 4), made(3, 4), SHARED[7:13].view(2, 3)),
    "out over the weight": (made(2, 4), SHARED[:12].view(3, 4), SHARED[11:17].view(2, 3)),
    "out between rows of x": (SHARED.view(8, 8)[:2, :4], made(3, 4), SHARED[5:11].view(2, 3)),
}  # fmt: skip


@each_path
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(case: str, portable: bool) -> None:
    arguments = REFUSED[case]
    before = [given.clone() if isinstance(given, Tensor) else None for given in arguments]
    capsules = [to_dlpack(given) if isinstance(given, Tensor) else given for given in arguments]
    with pytest.raises(ValueError, match=r"x|weight|out"):
        _linear.linear(capsules[0], capsules[1], capsules[2], portable)
    for given_, kept in zip(arguments, before, strict=True):
        assert kept is None or torch.equal(given_, kept)


def test_a_consumed_capsule_is_refused() -> None:
    capsule = to_dlpack(made(2, 4))
    from_dlpack(capsule)
    with pytest.raises(ValueError, match="x is no tensor"):
        _linear.linear(capsule, to_dlpack(made(3, 4)), to_dlpack(made(2, 3)))


def test_memory_that_is_not_aligned_is_refused() -> None:
    bytes_ = np.zeros(65, np.uint8)
    crooked = np.frombuffer(bytes_.data, np.float32, 8, 1).reshape(2, 4)
    with pytest.raises(ValueError, match="x is not aligned"):
        _linear.linear(crooked.__dlpack__(), to_dlpack(made(3, 4)), to_dlpack(made(2, 3)))


def test_rows_that_run_backwards_are_multiplied() -> None:
    x, weight, out = made(20, 40), made(7, 40, seed=1), torch.zeros(20, 7)
    _linear.linear(x.numpy()[::-1].__dlpack__(), to_dlpack(weight), out.numpy()[::-1].__dlpack__())
    assert torch.equal(out, native(x, weight))


# The choice.


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 128, 129, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_number_of_rows_has_its_product(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    x, weight, bias = made(rows, 96, dtype=dtype), made(50, 96, dtype=dtype, seed=1), made(50, dtype=dtype)
    found = product(x, weight, bias if with_bias else None)
    exact = functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert found.dtype == dtype
    assert torch.allclose(
        found.double(), exact, rtol=2e-2 if dtype == HALF else 1e-4, atol=0.1 if dtype == HALF else 1e-4
    )


def test_tensors_that_the_kernel_does_not_take_are_torchs() -> None:
    weight = made(12, 96)
    cases = [
        (made(96, 4).t(), weight),
        (made(4, 48), weight[:, :48]),
        (made(4, 96).double(), weight.double()),
    ]
    for x, given_ in cases:
        assert torch.equal(product(x, given_), functional.linear(x, given_))


def test_parameters_and_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        x, weight = made(4, 24), torch.nn.Parameter(made(6, 24, seed=1), requires_grad=False)
        assert torch.equal(product(x, weight), native(x, weight))


def test_the_rows_up_to_which_it_is_chosen_follow_from_threads_and_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = products._most_rows.__wrapped__
    monkeypatch.setattr(_linear, "simd", lambda: "avx2")
    for capability, limit in (("AVX2", 1 << 30), ("AVX512", MEMORY_ROWS)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert [most(threads) for threads in (1, 2, 64)] == [
            min(MOST_ROWS[1], limit),
            min(MOST_ROWS[2], limit),
            -1,
        ]
    monkeypatch.setattr(_linear, "simd", lambda: "portable")
    assert most(1) == -1
    monkeypatch.setattr(products, "_linear", None)
    assert most(1) == -1
