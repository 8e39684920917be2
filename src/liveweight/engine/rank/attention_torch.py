"""Attention by torch's operators: any device and dtype. Rows of equal length attend together, behind a mask.

The pages, and the choice of kernels, are rank/attention's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from liveweight.engine.rank.attention import Array, AttentionPlan, LayerPages, Pages, Tensor


class TorchAttention:
    """Torch's operators: any device and dtype. A token's bits may depend on what else is in the step."""

    name = "torch"

    def __init__(self) -> None:
        self._last: tuple[AttentionPlan, _Indices] | None = None

    def layer(self, pages: Pages) -> LayerPages:
        """Pages as torch indexes them best."""
        shape = (pages.blocks, pages.kv_heads, pages.block_tokens, pages.head_dim)
        return _TorchLayer(
            keys=torch.empty(shape, dtype=pages.dtype, device=pages.device),
            values=torch.empty(shape, dtype=pages.dtype, device=pages.device),
            kernels=self,
        )

    def indices(self, plan: AttentionPlan, device: torch.device) -> _Indices:
        """The plan as tensors. Made once for all layers of a step."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, _Indices.of(plan, device)
        return self._last[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indices:
    """A plan as tensors: the place of every token, and the rows of equal length together."""

    blocks: Tensor
    slots: Tensor
    groups: tuple[_Group, ...]
    last_block: int
    first_block: int

    @staticmethod
    def of(plan: AttentionPlan, device: torch.device) -> _Indices:
        lengths = np.diff(plan.row_starts)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        blocks = plan.tables[rows, plan.positions // plan.block_tokens]
        groups = [
            _Group.of(plan, np.flatnonzero(lengths == n), device) for n in np.unique(lengths[lengths > 0])
        ]
        return _Indices(
            blocks=torch.from_numpy(blocks.astype(np.int64)).to(device),
            slots=torch.from_numpy(plan.positions % plan.block_tokens).to(device),
            groups=tuple(groups),
            first_block=min((group.first_block for group in groups), default=0),
            last_block=max((group.last_block for group in groups), default=-1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows of equal length: their tokens [rows, n], the places of what they see [rows, context], and who sees what."""

    tokens: Tensor
    blocks: Tensor
    slots: Tensor
    mask: Tensor
    first_block: int
    last_block: int

    @staticmethod
    def of(plan: AttentionPlan, rows: Array, device: torch.device) -> _Group:
        starts = plan.row_starts[rows]
        tokens = starts[:, None] + np.arange(plan.row_starts[rows[0] + 1] - starts[0])
        positions = plan.positions[tokens]
        ends = positions.max(axis=1)
        seen = np.arange(ends.max() + 1)
        places = np.minimum(seen, ends[:, None])  # behind a row's end its last place, which has been written
        blocks = plan.tables[rows[:, None], places // plan.block_tokens].astype(np.int64)
        mask = seen <= positions[:, :, None]
        return _Group(
            tokens=torch.from_numpy(tokens).to(device),
            blocks=torch.from_numpy(blocks).to(device),
            slots=torch.from_numpy(places % plan.block_tokens).to(device),
            mask=torch.from_numpy(mask[:, None]).to(device),
            first_block=int(blocks.min()),
            last_block=int(blocks.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchLayer:
    keys: Tensor
    values: Tensor
    kernels: TorchAttention

    def store(self, plan: AttentionPlan, key: Tensor, value: Tensor) -> None:
        where = self._checked(plan)
        self.keys[where.blocks, :, where.slots] = key.to(self.keys.dtype)
        self.values[where.blocks, :, where.slots] = value.to(self.values.dtype)

    def attend(self, plan: AttentionPlan, query: Tensor) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._checked(plan).groups:
            key, value = (
                cache[group.blocks, :, group.slots].transpose(1, 2).to(query.dtype)
                for cache in (self.keys, self.values)
            )
            seen = torch.nn.functional.scaled_dot_product_attention(
                query[group.tokens].transpose(1, 2), key, value, attn_mask=group.mask, enable_gqa=True
            )
            out[group.tokens] = seen.transpose(1, 2)
        return out.flatten(1)

    def _checked(self, plan: AttentionPlan) -> _Indices:
        where = self.kernels.indices(plan, self.keys.device)
        if where.first_block < 0 or where.last_block >= len(self.keys):
            raise ValueError(
                f"a table has block {where.first_block} or {where.last_block} of {len(self.keys)}"
            )
        return where
