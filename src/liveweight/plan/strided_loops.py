"""Loops over memory, made short: the step that copy plans and digest plans share.

A strided box is a nest of loops (count, then one stride for each thing that advances). Loops that continue each other become one,
so that a kernel sees long runs; what is left beyond the loops that a kernel runs itself is unrolled here, as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from liveweight.spec.row_table import Table

Loop: TypeAlias = tuple[int, ...]
"""(count, stride of the first thing, stride of the second, ...), outermost first in a nest."""


def merged(loops: Sequence[Loop]) -> list[Loop]:
    """The same walk with as few loops as possible: lone steps dropped, an outer loop that continues its inner one joined to it."""
    result: list[Loop] = []
    for loop in reversed([loop for loop in loops if loop[0] != 1]):
        if result and all(
            outer == result[-1][0] * inner for outer, inner in zip(loop[1:], result[-1][1:], strict=True)
        ):
            result[-1] = (loop[0] * result[-1][0], *result[-1][1:])
        else:
            result.append(loop)
    return result[::-1]


def unrolled(loops: Sequence[Loop], things: int) -> Table:
    """Every step of a nest as offsets: shape (steps, things)."""
    offsets = np.zeros((1, things), dtype=np.int64)
    for count, *strides in loops:
        steps = np.arange(count, dtype=np.int64)[:, None] * np.array(strides, dtype=np.int64)
        offsets = (offsets[:, None, :] + steps[None, :, :]).reshape(-1, things)
    return offsets
