"""The product of activations and a weight, in the way that is fast on this machine.

A processor without instructions for bfloat16 multiplies it an element at a time; there a weight is widened to float32, a part that fits
into the cache after the other, and multiplied so. Sums are in float32 either way, and the result is rounded once.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

FEW_ROWS = 3
"""Below that many, widening costs more than it saves."""
PART_ELEMENTS = 1 << 19


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, inputs] times the transpose of [outputs, inputs]."""
    if x.dtype != torch.bfloat16 or len(x) < FEW_ROWS or x.device.type != "cpu" or _multiplies_bfloat16():
        return functional.linear(x, weight, bias)
    out = widened(x, weight)
    return out if bias is None else out.add_(bias)


def widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product by way of float32."""
    wide = x.float()
    out = x.new_empty(len(x), len(weight))
    step = max(64, PART_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        out[:, start : start + step] = torch.mm(wide, part.t())
    return out


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
