"""The product of activations and a weight, by the method that is fast on this machine.

A step that decodes has few rows and reads every weight once: the C kernel (native/linear.c) multiplies while it reads, on one thread.
Many rows are torch's. A processor without instructions for bfloat16 multiplies it an element at a time; there a weight is widened to
float32, a part that fits into the cache after the other, and multiplied so. Sums are in float32 either way, and the result is
rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.nn import functional
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

try:
    from liveweight.engine import _linear
except ImportError:  # it is left out where there was no compiler
    _linear = None  # type: ignore[assignment]

MOST_ROWS: Mapping[int, int] = {1: 128, 2: 16}
"""By torch's threads, the rows up to which the C kernel was measured faster, with weights that are in no cache. More threads together
read faster than one."""
MEMORY_ROWS = 8
"""Up to so many, the kernel takes the time of reading the weight: vectors wider than its own would not be faster."""
FEW_ROWS = 3
"""Below that many, widening costs more than it saves."""
PART_ELEMENTS = 1 << 19


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, inputs] times the transpose of [outputs, inputs]."""
    if x.shape[0] <= _most_rows(torch.get_num_threads()) and _kernel_takes(x, weight):
        out = native(x, weight)
    elif x.dtype != torch.bfloat16 or len(x) < FEW_ROWS or x.device.type != "cpu" or _multiplies_bfloat16():
        return functional.linear(x, weight, bias)
    else:
        out = widened(x, weight)
    return out if bias is None else out.add_(bias)


def native(x: torch.Tensor, weight: torch.Tensor, *, portable: bool = False) -> torch.Tensor:
    """The product by the C kernel: a row's result does not depend on the other rows, to the bit.

    ValueError where the kernel does not take the tensors. `portable` takes the plain C path: for tests.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    _linear.linear(to_dlpack(x), to_dlpack(weight), to_dlpack(out), portable)
    return out


def widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product by way of float32."""
    wide = x.float()
    out = x.new_empty(len(x), len(weight))
    step = max(64, PART_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        out[:, start : start + step] = torch.mm(wide, part.t())
    return out


def _kernel_takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    dtype = x.dtype
    return (
        (dtype is torch.float32 or (dtype is torch.bfloat16 and not _multiplies_bfloat16()))
        and weight.dtype is dtype
        and x.is_cpu
        and weight.is_contiguous()
        and x.stride(1) == 1
    )


@functools.cache
def _most_rows(threads: int) -> int:
    """The rows up to which the C kernel is the faster one; -1 where there is none that is."""
    if _linear is None or _linear.simd() == "portable":
        return -1
    most = MOST_ROWS.get(threads, -1)
    return most if torch.backends.cpu.get_cpu_capability() == "AVX2" else min(most, MEMORY_ROWS)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
