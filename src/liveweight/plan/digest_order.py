"""The order of digesting while copying: how many of a table's copies must be done before a row of a digest table may be read.

Computed from where the copies write, and not from what they are meant for: a copy to a wrong place delays the digest rows whose bytes it
touches, and shows in their digest.
"""

from __future__ import annotations

import numpy as np

from liveweight.spec.row_table import Table

_MEMORY = 1 << 48
"""Memories are laid out side by side, so far apart; none is larger."""


def copies_before(readings: Table, copies: Table) -> Table:
    """For each row of a digest table: the number of copies, from the table's first, after which no copy writes the row's bytes."""
    starts, ends = _written(copies)
    lows, highs = _read(readings)
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[order]) if len(order) else ends
    first = np.searchsorted(reach, lows, side="right")
    last = np.searchsorted(starts[order], highs, side="left")
    counts = np.zeros(len(readings), dtype=np.int64)
    touched = last > first
    if touched.any():
        numbers = np.append(order + 1, 0)
        bounds = np.stack([first[touched], last[touched]], axis=1).ravel()
        counts[touched] = np.maximum.reduceat(numbers, bounds)[::2]
    return counts


def _written(copies: Table) -> tuple[Table, Table]:
    """Where each copy's first byte goes, and the end of its last."""
    loops = ((copies[:, 4] - 1) * copies[:, 6], (copies[:, 7] - 1) * copies[:, 9])
    return _extents(copies[:, 2], copies[:, 3], loops, copies[:, 10])


def _read(readings: Table) -> tuple[Table, Table]:
    loops = ((readings[:, 4] - 1) * readings[:, 5], (readings[:, 8] - 1) * readings[:, 9])
    return _extents(readings[:, 0], readings[:, 1], loops, readings[:, 10])


def _extents(memory: Table, offset: Table, loops: tuple[Table, Table], size: Table) -> tuple[Table, Table]:
    below = sum((np.minimum(loop, 0) for loop in loops), start=np.zeros_like(offset))
    above = sum((np.maximum(loop, 0) for loop in loops), start=np.zeros_like(offset))
    begin = memory * _MEMORY + offset
    return begin + below, begin + above + size
