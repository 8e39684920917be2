"""Casts of float32 in torch, as bits: the same bits as the C kernels give, on any device. Importing this module needs torch."""

from __future__ import annotations

import torch


def _is_nan(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def bfloat16_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16, to the nearest, ties to even; every NaN becomes 0x7FC0. As integers: no device flushes what is small."""
    whole = bits.masked_fill(_is_nan(bits), 0x7FC00000)
    return ((whole + (((whole >> 16) & 1) + 0x7FFF)) >> 16).to(torch.int16)


def float16_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 to float16, to the nearest, ties to even; every NaN becomes 0x7E00."""
    halves = bits.contiguous().view(torch.float32).to(torch.float16).view(torch.int16)
    return halves.masked_fill(_is_nan(bits), 0x7E00)
