"""Copy ranges: rows of a table in ranges of about equal bytes, run on several threads by kernels that release the GIL.

The threads live as long as one call; the caller's thread is one of them. The caller knows what the rows mean.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from liveweight.devices.copy_threads import WorkQueue, run_once
from liveweight.devices.device import Device
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.row_table import Table

Result = TypeVar("Result")
Range: TypeAlias = tuple[int, int]

ROW_BYTES = 1 << 20
"""Longer rows are cut before they are shared: the grain of balance."""

ALONE_BYTES = 1 << 20
"""Less than this is not worth a second thread."""

RANGES_PER_THREAD = 4
"""A few, so that the other threads can take the later ranges of a slow one."""


def threads_for(given: int | None, device: Device) -> int:
    """On a GPU one, the caller's own: another would not queue its work behind what the caller has queued."""
    if device.handles is not None:
        return 1
    return (os.cpu_count() or 1) if given is None else given


def ranges(sizes_bytes: Table, threads: int) -> list[Range]:
    """Rows in order, in ranges [first, last) of about equal bytes: a few per thread, or one where it is little work."""
    rows = len(sizes_bytes)
    if rows == 0:
        return []
    ends = np.cumsum(sizes_bytes)
    total = int(ends[-1])
    if threads <= 1 or total <= ALONE_BYTES:
        return [(0, rows)]
    marks = np.arange(1, threads * RANGES_PER_THREAD) * (total / (threads * RANGES_PER_THREAD))
    cuts = np.unique([0, *np.searchsorted(ends, marks).tolist(), rows]).tolist()
    return list(itertools.pairwise(cuts))


def run_shared(run: Callable[[int, int], Result], shares: Sequence[Range], threads: int) -> list[Result]:
    """Every range once, by that many threads. Returns, or raises the first failure, when no thread runs any more."""
    if threads <= 1 or len(shares) <= 1:
        return [run(first, last) for first, last in shares]
    queue, done = WorkQueue(len(shares)), dict[int, Result]()

    def work(_: int, number: int) -> None:
        done[number] = run(*shares[number])

    lanes = min(threads, len(shares))
    run_once(lanes, lambda lane: queue.work_through(lane, work), name="liveweight-share")
    return [done[number] for number in range(len(shares))]


def summed(parts: list[Lanes], slots: int) -> Lanes:
    """The digests of all slots from those of every range."""
    total = np.zeros((slots, SEEDS), dtype=np.uint32)
    for part in parts:
        total += part
    return total
