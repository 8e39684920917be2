"""Attention over a paged cache: where a step's keys and values are kept, and what its queries see of them.

Owns the pages of every layer and the kernels that write and read them. Which block belongs to which sequence is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from liveweight.devices.memory import Memory

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]
Numbers: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Array | Tensor


class AttentionPlan:
    """Which rows, positions and pages a step's tokens have. Built once per step, shared by all layers; never changes.

    Row r has the tokens from `row_starts[r]` to `row_starts[r + 1]`; position p of it lies in block `tables[r, p // block_tokens]`.
    A token sees its row up to its own position. Entries of a table behind the last position in use may be anything.
    What does not fit together raises ValueError; that every block exists is checked where the pages are known.
    """

    __slots__ = ("block_tokens", "positions", "row_starts", "tables")

    def __init__(
        self, *, row_starts: Numbers, positions: Numbers, tables: Numbers, block_tokens: int
    ) -> None:
        self.row_starts = _own(row_starts, np.int64, 1, "row_starts")
        self.positions = _own(positions, np.int64, 1, "positions")
        self.tables = _own(tables, np.int32, 2, "tables")
        self.block_tokens = block_tokens
        rows, tokens = len(self.row_starts) - 1, len(self.positions)
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens")
        if rows < 0 or len(self.tables) != rows:
            raise ValueError(
                f"{len(self.row_starts)} row_starts for {len(self.tables)} tables: one more is needed"
            )
        if self.row_starts[0] != 0 or self.row_starts[-1] != tokens or (np.diff(self.row_starts) < 0).any():
            raise ValueError(f"row_starts {self.row_starts.tolist()} do not cover {tokens} tokens in order")
        limit = self.tables.shape[1] * block_tokens
        if tokens and not (self.positions.min() >= 0 and self.positions.max() < limit):
            raise ValueError(f"a position is not between 0 and {limit - 1}, where its table ends")

    @property
    def tokens(self) -> int:
        """How many tokens the step has."""
        return len(self.positions)


def _own(numbers: Numbers, dtype: type[np.integer[Any]], ndim: int, name: str) -> Array:
    """A read-only copy of whole numbers that fit the type."""
    given = np.asarray(numbers)
    if given.ndim != ndim or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: an array of {given.dtype} and shape {given.shape}, not of {ndim} dimensions and integers"
        )
    limits = np.iinfo(dtype)
    if given.size and (given.min() < limits.min or given.max() > limits.max):
        raise ValueError(f"{name}: a number does not fit {limits.dtype}")
    array = np.array(given, dtype=dtype, order="C", copy=True)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What one layer keeps: `blocks` pages of `block_tokens` positions for each kv head."""

    blocks: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class LayerPages(Protocol):
    """One layer's pages. One thread at a time; a call's tensors must not change while it runs."""

    @property
    def keys(self) -> Tensor:
        """A view of the keys: [blocks, kv_heads, block_tokens, head_dim], in any order of memory."""

    @property
    def values(self) -> Tensor:
        """A view of the values, of the same shape."""

    def store(self, plan: AttentionPlan, key: Tensor, value: Tensor) -> None:
        """Write [tokens, kv_heads, dim] to the places that the plan gives them."""

    def attend(self, plan: AttentionPlan, query: Tensor) -> Tensor:
        """What queries [tokens, heads, dim] see: [tokens, heads * dim], contiguous, of the query's dtype."""


class AttentionKernels(Protocol):
    """Makes layers' pages. `name` says which implementation it is."""

    @property
    def name(self) -> str:
        """The implementation, with its instruction set."""

    def layer(self, pages: Pages) -> LayerPages:
        """Memory for one layer. It is not written: a page takes room from its first use on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """An implementation, its name, and why it is not the native one; None if it is."""

    kernels: AttentionKernels
    name: str
    reason: str | None = None


def choose(dtype: torch.dtype, device: torch.device) -> ChosenAttention:
    """The C kernels; torch's operators where those were not built, or do not know the device or dtype."""
    from liveweight.engine.rank.attention_torch import TorchAttention

    fallback = TorchAttention()
    try:
        from liveweight.engine.rank.attention_native import DTYPES, NativeAttention
    except ImportError as error:
        return ChosenAttention(kernels=fallback, name=fallback.name, reason=str(error))
    if device.type != "cpu" or dtype not in DTYPES:
        reason = f"the C kernels have no pages of {dtype} on {device}"
        return ChosenAttention(kernels=fallback, name=fallback.name, reason=reason)
    native = NativeAttention()
    return ChosenAttention(kernels=native, name=native.name)


class PagedAttention:
    """Keys and values of every layer, in pages, and attention over them. Called from the rank's step thread.

    Which kernels it has is decided when it is made: `name` and `reason` say which and why. Sizes are of this rank's heads.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        heads: int,
        head_dim: int,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        chosen: ChosenAttention | None = None,
    ) -> None:
        if min(layers, kv_heads, heads, head_dim, blocks, block_tokens) < 1 or heads % kv_heads:
            raise ValueError(
                f"no cache of {layers} layers with {blocks} blocks of {block_tokens} tokens, for {heads} heads of {head_dim} "
                f"over {kv_heads} kv heads: each is at least 1, heads a multiple of kv heads"
            )
        self.pages = Pages(
            blocks=blocks,
            kv_heads=kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device(device),
        )
        chosen = choose(dtype, self.pages.device) if chosen is None else chosen
        self.name, self.reason = chosen.name, chosen.reason
        self.heads = heads
        self.layers = tuple(chosen.kernels.layer(self.pages) for _ in range(layers))

    @property
    def size_bytes(self) -> int:
        """What all pages take once each has been used."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def memories(self) -> list[Memory]:
        """Where all pages lie."""
        parts = [part for layer in self.layers for part in (layer.keys, layer.values)]
        return [Memory.from_tensor(part) for part in parts]

    def attend(self, plan: AttentionPlan, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key and value [tokens, kv_heads, dim], then let query [tokens, heads, dim] see them: [tokens, heads * dim].

        They may be views of one tensor; nothing is copied as long as the items of a head lie side by side.
        ValueError, before anything is written, for what does not fit the plan or the pages.
        """
        pages = self.pages
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} of {len(self.layers)}")
        if plan.block_tokens != pages.block_tokens:
            raise ValueError(
                f"a plan for blocks of {plan.block_tokens} tokens, pages of {pages.block_tokens}"
            )
        for name, given, heads in (
            ("query", query, self.heads),
            ("key", key, pages.kv_heads),
            ("value", value, pages.kv_heads),
        ):
            if given.shape != (plan.tokens, heads, pages.head_dim):
                expected = (plan.tokens, heads, pages.head_dim)
                raise ValueError(f"{name} has the shape {tuple(given.shape)}, not {expected}")
            if given.device != self.layers[layer].keys.device or given.dtype != query.dtype:
                raise ValueError(f"{name} is {given.dtype} on {given.device}, for queries of {query.dtype}")
        if not query.dtype.is_floating_point:
            raise ValueError(f"queries of {query.dtype}")
        self.layers[layer].store(plan, key, value)
        return self.layers[layer].attend(plan, query)
