"""Attention over pages, every implementation against a dense softmax in float64; what is refused; bits that stay the same."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.engine import _attention
from liveweight.engine.rank.attention import (
    AttentionKernels,
    AttentionPlan,
    ChosenAttention,
    PagedAttention,
    choose,
)
from liveweight.engine.rank.attention_native import NativeAttention
from liveweight.engine.rank.attention_torch import TorchAttention

Tensor = torch.Tensor
KERNELS: dict[str, Callable[[], AttentionKernels]] = {
    "native": NativeAttention,
    "portable": lambda: NativeAttention(portable=True),
    "torch": TorchAttention,
}
each_kernels = pytest.mark.parametrize("kernels", KERNELS)
each_native = pytest.mark.parametrize("kernels", ["native", "portable"])
CHUNK = 128
"""Positions between two corrections of the C kernels' softmax."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sequence in a step: `new` tokens behind `old` ones, of which the first `shared` blocks are those of the row before."""

    old: int
    new: int
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    tokens: int = 16
    dtype: torch.dtype = torch.float32


class Case:
    """A step over a cache in which everything that must not be read is NaN."""

    def __init__(self, shape: Shape, rows: Sequence[Row], seed: int = 0) -> None:
        self.shape, self.rows = shape, rows
        random = torch.Generator().manual_seed(seed)
        self.plan = AttentionPlan(
            row_starts=np.cumsum([0, *(row.new for row in rows)]),
            positions=np.concatenate([np.arange(row.old, row.old + row.new) for row in rows]),
            tables=self._tables(np.random.default_rng(seed)),
            block_tokens=shape.tokens,
        )
        self.keys, self.values = (self._pages(random) for _ in range(2))
        heads, all_heads = shape.kv_heads * shape.group, shape.kv_heads * (shape.group + 2)
        flat = torch.randn(self.plan.tokens, 3 + all_heads * shape.dim, generator=random).to(shape.dtype)
        fused = flat[:, 3:].view(self.plan.tokens, all_heads, shape.dim)
        self.query, self.key = fused[:, :heads], fused[:, heads : heads + shape.kv_heads]
        self.value = fused[:, heads + shape.kv_heads :]

    def _tables(self, random: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int32]]:
        needed = [-(-(row.old + row.new) // self.shape.tokens) for row in self.rows]
        self.blocks = sum(needed) + 3
        free = random.permutation(self.blocks).astype(np.int32)
        tables = np.full((len(needed), max(needed) + 1), -7, dtype=np.int32)
        for number, count in enumerate(needed):
            mine, free = free[:count], free[count:]
            tables[number, :count] = mine
            shared = min(self.rows[number].shared, self.rows[number].old // self.shape.tokens)
            if number and shared <= min(needed[number - 1], self.rows[number - 1].old // self.shape.tokens):
                tables[number, :shared] = tables[number - 1, :shared]
        return tables

    def places(self, row: int, positions: range) -> tuple[Tensor, Tensor]:
        table = torch.from_numpy(self.plan.tables[row].astype(np.int64))
        where = torch.tensor(list(positions), dtype=torch.int64)
        return table[where // self.shape.tokens], where % self.shape.tokens

    def _pages(self, random: torch.Generator) -> Tensor:
        shape = self.shape
        pages = torch.full(
            (self.blocks, shape.kv_heads, shape.tokens, shape.dim), torch.nan, dtype=shape.dtype
        )
        for number, row in enumerate(self.rows):
            blocks, slots = self.places(number, range(row.old))
            past = torch.randn(row.old, shape.kv_heads, shape.dim, generator=random)
            pages[blocks, :, slots] = past.to(shape.dtype)
        return pages

    def cache(self, kernels: AttentionKernels) -> PagedAttention:
        shape = self.shape
        made = PagedAttention(
            layers=2,
            kv_heads=shape.kv_heads,
            heads=shape.kv_heads * shape.group,
            head_dim=shape.dim,
            blocks=self.blocks,
            block_tokens=shape.tokens,
            dtype=shape.dtype,
            device="cpu",
            chosen=ChosenAttention(kernels=kernels, name=kernels.name),
        )
        made.layers[1].keys.copy_(self.keys)
        made.layers[1].values.copy_(self.values)
        return made

    def run(self, kernels: AttentionKernels) -> tuple[PagedAttention, Tensor]:
        made = self.cache(kernels)
        return made, made.attend(self.plan, 1, self.query, self.key, self.value)

    def stored(self) -> tuple[Tensor, Tensor]:
        """The pages as they should be after the step."""
        keys, values = self.keys.clone(), self.values.clone()
        for number, row in enumerate(self.rows):
            blocks, slots = self.places(number, range(row.old, row.old + row.new))
            tokens = slice(int(self.plan.row_starts[number]), int(self.plan.row_starts[number + 1]))
            keys[blocks, :, slots] = self.key[tokens].to(keys.dtype)
            values[blocks, :, slots] = self.value[tokens].to(values.dtype)
        return keys, values

    @cached_property
    def expected(self) -> Tensor:
        """The dense softmax, row by row, in float64."""
        keys, values = self.stored()
        out = []
        for number, row in enumerate(self.rows):
            blocks, slots = self.places(number, range(row.old + row.new))
            first = int(self.plan.row_starts[number])
            grouped = (row.new, self.shape.kv_heads, self.shape.group, self.shape.dim)
            query = self.query[first : first + row.new].double().reshape(grouped)
            scores = torch.einsum("nkgd,tkd->nkgt", query, keys[blocks, :, slots].double())
            hidden = torch.ones(scores.shape[0], scores.shape[-1], dtype=torch.bool).triu(row.old + 1)
            scores = (scores / math.sqrt(self.shape.dim)).masked_fill(hidden[:, None, None], -math.inf)
            weights = torch.softmax(scores, dim=-1)
            out.append(torch.einsum("nkgt,tkd->nkgd", weights, values[blocks, :, slots].double()).flatten(1))
        return torch.cat(out)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are not worth a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def agree(got: Tensor, case: Case, kernels: str) -> None:
    want = case.expected
    assert got.shape == want.shape and got.is_contiguous() and got.dtype == case.query.dtype
    if case.query.dtype == torch.float32:
        atol, rtol = 2e-5, 2e-5
    else:  # the C kernels round once, at the end; torch rounds weights as well
        atol, rtol = (2e-2, 2e-2) if kernels == "torch" else (1e-4, 2.0**-8)
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol)


MIXES = {
    "one token, nothing before": [Row(old=0, new=1)],
    "decode": [Row(old=n, new=1) for n in (0, 1, 15, 16, 17, 126, 127, 128, 129, 255, 256, 300)],
    "decode with drafts": [Row(old=n, new=2) for n in (14, 15, 16, 126, 127, 128)],
    "a prompt": [Row(old=0, new=150)],
    "a prompt's next part": [Row(old=120, new=100)],
    "a mixture": [Row(old=0, new=37), Row(old=200, new=1), Row(old=130, new=9), Row(old=31, new=2)],
    "shared prefix": [Row(old=64, new=5), Row(old=64, new=1, shared=4), Row(old=70, new=3, shared=3)],
    "a row without tokens": [Row(old=3, new=0), Row(old=40, new=1), Row(old=9, new=0)],
}


@each_kernels
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_token_sees_its_row_up_to_itself(kernels: str, mix: str, dtype: torch.dtype) -> None:
    case = Case(Shape(dtype=dtype), MIXES[mix])
    cache, out = case.run(KERNELS[kernels]())
    agree(out, case, kernels)
    for pages, expected in zip((cache.layers[1].keys, cache.layers[1].values), case.stored(), strict=True):
        torch.testing.assert_close(pages, expected, atol=0, rtol=0, equal_nan=True)


@each_kernels
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 24, 33])
def test_heads_share_their_kv_head_in_groups_of_any_size(kernels: str, group: int, dim: int) -> None:
    case = Case(Shape(group=group, dim=dim), [Row(old=0, new=11), Row(old=135, new=1), Row(old=20, new=2)])
    agree(case.run(KERNELS[kernels]())[1], case, kernels)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = Shape(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        dim=draw(st.sampled_from([1, 7, 8, 16, 40, 64, 80])),
        tokens=draw(st.sampled_from([1, 3, 8, 12, 16, 24, 160])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    old = st.one_of(st.integers(0, 300), st.sampled_from([CHUNK - 1, CHUNK, 2 * CHUNK - 1]))
    new = st.one_of(st.sampled_from([1, 2]), st.integers(1, 70))
    rows = st.builds(Row, old=old, new=new, shared=st.integers(0, 3))
    return Case(shape, draw(st.lists(rows, min_size=1, max_size=4)), draw(st.integers(0, 1 << 20)))


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_any_shape_and_mixture_agrees_with_the_dense_softmax(case: Case) -> None:
    for kernels, make in KERNELS.items():
        agree(case.run(make())[1], case, kernels)


def alone(case: Case, cache: PagedAttention, token: int) -> Tensor:
    """One token as a row of its own, over what the step has stored."""
    row = int(np.searchsorted(case.plan.row_starts, token, side="right")) - 1
    plan = AttentionPlan(
        row_starts=[0, 1],
        positions=case.plan.positions[token : token + 1],
        tables=case.plan.tables[row : row + 1],
        block_tokens=case.shape.tokens,
    )
    one = slice(token, token + 1)
    return cache.attend(plan, 1, case.query[one], case.key[one], case.value[one])


@each_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [8, 12, 16])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    kernels: str, dtype: torch.dtype, group: int, tokens: int
) -> None:
    rows = [Row(old=90, new=60), Row(old=300, new=1), Row(old=127, new=2), Row(old=0, new=40)]
    case = Case(Shape(group=group, dim=40, tokens=tokens, dtype=dtype), rows)
    cache, out = case.run(KERNELS[kernels]())
    for token in range(case.plan.tokens):
        assert torch.equal(alone(case, cache, token)[0], out[token]), token


@each_native
def test_a_later_token_that_is_not_finite_does_not_reach_earlier_ones(kernels: str) -> None:
    case = Case(Shape(), [Row(old=125, new=9)])
    clean = case.run(KERNELS[kernels]())[1]
    case.key[5], case.value[5] = torch.inf, torch.nan
    spoilt = case.run(KERNELS[kernels]())[1]
    assert torch.equal(spoilt[:5], clean[:5])
    assert spoilt[5:].isnan().all()


@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_portable_path_agrees_with_the_fast_one(dim: int, dtype: torch.dtype) -> None:
    case = Case(Shape(dim=dim, dtype=dtype), MIXES["a mixture"])
    fast, plain = (case.run(NativeAttention(portable=portable))[1].float() for portable in (False, True))
    torch.testing.assert_close(fast, plain, atol=2e-6, rtol=2e-6 if dtype == torch.float32 else 2.0**-7)


@each_native
def test_weights_are_exponentials_to_six_digits(kernels: str) -> None:
    steps = torch.linspace(0, 80, 4001, dtype=torch.float32)
    cache = PagedAttention(
        layers=1,
        kv_heads=1,
        heads=1,
        head_dim=16,
        blocks=1,
        block_tokens=2,
        dtype=torch.float32,
        device="cpu",
        chosen=ChosenAttention(kernels=KERNELS[kernels](), name=kernels),
    )
    cache.layers[0].keys.zero_()
    cache.layers[0].values.zero_()
    plan = AttentionPlan(row_starts=[0, 1], positions=[1], tables=[[0]], block_tokens=2)
    key, value, query = torch.zeros(1, 1, 16), torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
    key[0, 0, 0] = -4.0  # the scale is 1/4: the second position's score is minus the query
    for step in steps:
        query[0, 0, 0] = step
        weight = math.exp(-float(step))
        expected = weight / (1.0 + weight)
        got = float(cache.attend(plan, 0, query, key, value)[0, 0])
        assert abs(got - expected) <= 1e-6 * expected, float(step)


@each_kernels
def test_heads_whose_items_are_scattered_are_read_as_well(kernels: str) -> None:
    case = Case(Shape(dim=16), MIXES["a mixture"])
    case.query, case.key, case.value = (
        part.transpose(0, 2).contiguous().transpose(0, 2) for part in (case.query, case.key, case.value)
    )
    agree(case.run(KERNELS[kernels]())[1], case, kernels)


@each_kernels
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tensors_may_be_finer_or_coarser_than_the_pages(kernels: str, given: torch.dtype) -> None:
    kept = torch.bfloat16 if given == torch.float32 else torch.float32
    case = Case(Shape(dtype=kept), MIXES["a mixture"])
    case.query, case.key, case.value = (part.to(given) for part in (case.query, case.key, case.value))
    cache, out = case.run(KERNELS[kernels]())
    assert out.dtype == given and cache.layers[1].keys.dtype == kept
    stored = case.stored()[0]
    torch.testing.assert_close(cache.layers[1].keys, stored, atol=0, rtol=0, equal_nan=True)
    agree(out, case, kernels)


@each_kernels
def test_a_step_without_tokens_is_a_step(kernels: str) -> None:
    case = Case(Shape(), [Row(old=5, new=0)])
    assert case.run(KERNELS[kernels]())[1].shape == (0, 4 * 64)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE


def test_pages_take_no_memory_before_they_are_used() -> None:
    before = resident_bytes()
    cache = PagedAttention(
        layers=2,
        kv_heads=4,
        heads=8,
        head_dim=64,
        blocks=16384,
        block_tokens=16,
        dtype=torch.float32,
        device="cpu",
    )
    assert cache.size_bytes == 2 * 2 * 16384 * 4 * 16 * 64 * 4
    assert resident_bytes() - before < 1 << 26


def test_the_c_kernels_are_chosen_where_they_can_be() -> None:
    chosen = choose(torch.bfloat16, torch.device("cpu"))
    assert chosen.name == f"native ({_attention.simd(64)})" and chosen.reason is None


def test_another_dtype_or_device_falls_back_to_torch_and_says_why() -> None:
    for dtype, device in ((torch.float16, "cpu"), (torch.float32, "meta")):
        chosen = choose(dtype, torch.device(device))
        assert chosen.name == "torch" and chosen.reason is not None
        assert str(dtype) in chosen.reason and device in chosen.reason


def test_without_the_c_kernels_torch_is_chosen_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liveweight.engine.rank.attention_native", None)
    cache = PagedAttention(
        layers=1, kv_heads=1, heads=1, head_dim=8, blocks=1, block_tokens=4, dtype=torch.float32, device="cpu"
    )
    assert cache.name == "torch" and cache.reason is not None and "attention_native" in cache.reason


def test_a_head_of_odd_size_takes_the_portable_path() -> None:
    assert _attention.simd(33) == "portable"


PLANS: dict[str, dict[str, Any]] = {
    "starts do not begin at zero": {"row_starts": [1, 2]},
    "starts go backwards": {"row_starts": [0, 3, 2], "tables": [[0], [0]]},
    "starts end early": {"row_starts": [0, 1]},
    "no starts": {"row_starts": []},
    "a table too many": {"tables": [[0], [0]]},
    "a table of one dimension": {"tables": [0]},
    "a negative position": {"positions": [-1, 0]},
    "a position behind the table": {"positions": [0, 4]},
    "positions that are no integers": {"positions": [0.0, 1.0]},
    "a block number that does not fit": {"tables": [[1 << 31]]},
    "blocks of nothing": {"block_tokens": 0},
}


@pytest.mark.parametrize("wrong", PLANS)
def test_a_plan_that_does_not_fit_together_is_refused(wrong: str) -> None:
    right: dict[str, Any] = {"row_starts": [0, 2], "positions": [0, 1], "tables": [[0]], "block_tokens": 4}
    AttentionPlan(**right)
    with pytest.raises(ValueError):
        AttentionPlan(**right | PLANS[wrong])


@each_kernels
@pytest.mark.parametrize("block", [-1, 99, 2**31 - 1, -(2**31)])
def test_a_block_that_does_not_exist_is_refused(kernels: str, block: int) -> None:
    case = Case(Shape(), [Row(old=40, new=1), Row(old=20, new=1)])
    cache = case.cache(KERNELS[kernels]())
    tables = case.plan.tables.copy()
    tables[1, 0] = block
    plan = AttentionPlan(row_starts=[0, 1, 2], positions=[40, 20], tables=tables, block_tokens=16)
    with pytest.raises(ValueError, match="block"):
        cache.attend(plan, 1, case.query, case.key, case.value)
    torch.testing.assert_close(cache.layers[1].keys, case.keys, atol=0, rtol=0, equal_nan=True)


@each_kernels
def test_tensors_that_do_not_fit_the_step_are_refused(kernels: str) -> None:
    case = Case(Shape(), [Row(old=40, new=2)])
    cache = case.cache(KERNELS[kernels]())
    query, key, value = case.query, case.key, case.value
    wrong: dict[str, tuple[int, Tensor, Tensor, Tensor]] = {
        "layer": (2, query, key, value),
        "negative layer": (-1, query, key, value),
        "tokens": (1, query[:1], key, value),
        "heads": (1, query[:, :3], key, value),
        "kv heads": (1, query, key[:, :1], value),
        "dim": (1, query, key, value[..., :32]),
        "integers": (1, query.int(), key.int(), value.int()),
        "mixed dtypes": (1, query.double(), key, value),
        "device": (1, query, key.to("meta"), value),
    }
    for arguments in wrong.values():
        with pytest.raises(ValueError):
            cache.attend(case.plan, *arguments)
    torch.testing.assert_close(cache.layers[1].keys, case.keys, atol=0, rtol=0, equal_nan=True)
    with pytest.raises(ValueError, match="blocks of 8"):
        cache.attend(
            AttentionPlan(row_starts=[0, 2], positions=[0, 1], tables=[[0]], block_tokens=8),
            *(1, query, key, value),
        )


def test_a_cache_of_impossible_sizes_is_refused() -> None:
    right: dict[str, Any] = dict.fromkeys(("layers", "blocks", "block_tokens"), 1)
    right |= {"kv_heads": 2, "heads": 4, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
    PagedAttention(**right)
    for wrong in ({"heads": 3}, {"kv_heads": 0}, {"layers": 0}, {"blocks": -1}, {"head_dim": 0}):
        with pytest.raises(ValueError, match="no cache"):
            PagedAttention(**right | wrong)
    with pytest.raises(ValueError, match="float16"):
        native = NativeAttention()
        PagedAttention(
            **right | {"dtype": torch.float16, "chosen": ChosenAttention(kernels=native, name=native.name)}
        )


def raw() -> list[Any]:
    """Arguments of the C functions, for 2 rows of 2 tokens, 3 blocks, 2 kv heads, 4 tokens, 8 dimensions."""
    return [
        np.zeros((3, 2, 8, 4), np.float32),
        np.zeros((3, 2, 4, 8), np.float32),
        np.array([0, 2, 4]),
        np.array([0, 1, 4, 5]),
        np.array([[0, -1], [1, 2]], np.int32),
        np.zeros((4, 2, 8), np.float32),
        np.zeros((4, 2, 8), np.float32),
    ]


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def unaligned(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    memory = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 1, np.uint8)
    return memory[1:].view(dtype).reshape(shape)


HOSTILE: dict[str, tuple[int, Callable[[], Any]]] = {
    "keys are none": (0, lambda: None),
    "keys of integers": (0, lambda: np.zeros((3, 2, 8, 4), np.int32)),
    "keys of another size": (0, lambda: np.zeros((2, 2, 8, 4), np.float32)),
    "keys not turned": (0, lambda: np.zeros((3, 2, 4, 8), np.float32)),
    "keys of another type than values": (0, lambda: np.zeros((3, 2, 8, 4), np.int16)),
    "keys not contiguous": (0, lambda: np.zeros((6, 2, 8, 4), np.float32)[::2]),
    "keys unaligned": (0, lambda: unaligned((3, 2, 8, 4), "<f4")),
    "keys of the other byte order": (0, lambda: np.zeros((3, 2, 8, 4), ">f4")),
    "values of three dimensions": (1, lambda: np.zeros((3, 2, 32), np.float32)),
    "values without tokens": (1, lambda: np.zeros((3, 2, 0, 8), np.float32)),
    "starts of 32 bits": (2, lambda: np.array([0, 2, 4], np.int32)),
    "no starts": (2, lambda: np.zeros(0, np.int64)),
    "starts beyond the tokens": (2, lambda: np.array([0, 2, 5])),
    "starts backwards": (2, lambda: np.array([0, 5, 4])),
    "negative starts": (2, lambda: np.array([0, -(2**62), 4])),
    "starts of other rows": (2, lambda: np.array([0, 4])),
    "starts that jump": (2, lambda: np.arange(10)[::4]),
    "a negative position": (3, lambda: np.array([0, 1, 4, -1])),
    "a position behind the table": (3, lambda: np.array([0, 1, 4, 8])),
    "a huge position": (3, lambda: np.array([0, 1, 4, 2**63 - 1])),
    "a position on no block": (3, lambda: np.array([0, 4, 4, 5])),
    "too few positions": (3, lambda: np.array([0, 1, 4])),
    "a block too high": (4, lambda: np.array([[0, -1], [3, 2]], np.int32)),
    "a negative block": (4, lambda: np.array([[0, -1], [1, -2]], np.int32)),
    "tables of 64 bits": (4, lambda: np.array([[0, -1], [1, 2]])),
    "tables of no blocks": (4, lambda: np.zeros((2, 0), np.int32)),
    "a table too few": (4, lambda: np.zeros((1, 2), np.int32)),
    "fewer tokens": (5, lambda: np.zeros((3, 2, 8), np.float32)),
    "other dimensions": (5, lambda: np.zeros((4, 2, 16), np.float32)),
    "other heads": (5, lambda: np.zeros((4, 3, 8), np.float32)),
    "items apart": (5, lambda: np.zeros((4, 2, 16), np.float32)[..., ::2]),
    "of doubles": (5, lambda: np.zeros((4, 2, 8))),
    "unaligned": (5, lambda: unaligned((4, 2, 8), "<f4")),
    "strides between items": (
        5,
        lambda: np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (4, 2, 8), (34, 32, 4)),
    ),
    "fewer tokens in the second": (6, lambda: np.zeros((3, 2, 8), np.float32)),
    "other heads in the second": (6, lambda: np.zeros((4, 4, 8), np.float32)),
    "the second as text": (6, lambda: "text"),
}


@pytest.mark.parametrize("wrong", HOSTILE)
@pytest.mark.parametrize("function", [_attention.store, _attention.attend])
def test_the_c_functions_refuse_what_would_leave_their_memory(
    wrong: str, function: Callable[..., None]
) -> None:
    function(*raw())
    number, make = HOSTILE[wrong]
    arguments = raw()
    arguments[number] = make()
    with pytest.raises(ValueError):
        function(*arguments)


def test_the_c_functions_write_only_where_they_may() -> None:
    for function, written in ((_attention.store, (0, 1)), (_attention.attend, (6,))):
        for number in written:
            arguments = raw()
            arguments[number] = read_only(arguments[number])
            with pytest.raises(ValueError, match="writable"):
                function(*arguments)
    arguments = raw()
    arguments[4] = arguments[0].view(np.int32).reshape(-1)[:4].reshape(2, 2)
    with pytest.raises(ValueError, match="tables lie where the call writes"):
        _attention.store(*arguments)
    arguments = raw()
    arguments[6] = np.zeros((4, 2, 16), np.float32)[..., :8]
    with pytest.raises(ValueError, match="out"):
        _attention.attend(*arguments)


def test_heads_of_absurd_size_are_refused() -> None:
    arguments = raw()
    arguments[0], arguments[1] = (
        np.zeros((0, 2, 1 << 40, 4), np.float32),
        np.zeros((0, 2, 4, 1 << 40), np.float32),
    )
    with pytest.raises(ValueError, match="dimensions per head"):
        _attention.attend(*arguments)
