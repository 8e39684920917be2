"""Attention by the C kernels (native/attention.c). Importing this module fails where they were not built, and says so.

The pages, and the choice of kernels, are rank/attention's.
"""

from __future__ import annotations

import torch

from liveweight.engine import _attention
from liveweight.engine.rank.attention import Array, AttentionPlan, LayerPages, Pages, Tensor

DTYPES = (torch.float32, torch.bfloat16)


class NativeAttention:
    """The C kernels: pages of float32 or bfloat16 in the processor's memory, sums in float32, one thread.

    A token's result depends on its own query and on what it sees, to the bit: not on its batch, nor on whether it came as a
    part of a prompt or alone. `portable` takes the plain C path even where the processor has a faster one: for tests.
    """

    def __init__(self, *, portable: bool = False) -> None:
        self._portable = portable

    @property
    def name(self) -> str:
        """With the instruction set. Heads whose size is no multiple of 8 take the portable path in any case."""
        return f"native ({'portable' if self._portable else _attention.simd(8)})"

    def layer(self, pages: Pages) -> LayerPages:
        """Pages as the kernels read them: keys are turned inside their pages, and shown as if they were not."""
        if pages.device.type != "cpu" or pages.dtype not in DTYPES:
            raise ValueError(f"the C kernels have no pages of {pages.dtype} on {pages.device}")
        outer = (pages.blocks, pages.kv_heads)
        turned = torch.empty((*outer, pages.head_dim, pages.block_tokens), dtype=pages.dtype)
        values = torch.empty((*outer, pages.block_tokens, pages.head_dim), dtype=pages.dtype)
        return _NativeLayer(turned, values, self._portable)


class _NativeLayer:
    def __init__(self, turned: Tensor, values: Tensor, portable: bool) -> None:
        self.keys, self.values = turned.transpose(2, 3), values
        self._cache = _array(turned), _array(values)
        self._portable = portable

    def store(self, plan: AttentionPlan, key: Tensor, value: Tensor) -> None:
        _attention.store(
            *self._cache, plan.row_starts, plan.positions, plan.tables, _array(key), _array(value)
        )

    def attend(self, plan: AttentionPlan, query: Tensor) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        _attention.attend(
            *self._cache,
            plan.row_starts,
            plan.positions,
            plan.tables,
            _array(query),
            _array(out),
            self._portable,
        )
        return out.flatten(1)


def _array(tensor: Tensor) -> Array:
    """The tensor's memory as the kernels take it: bfloat16 as integers of the same bits. A copy only of scattered heads."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"a tensor of {tensor.dtype}, not of {DTYPES}")
    tensor = tensor.detach()
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
