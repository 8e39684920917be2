"""Two swaps of live weights and shadow: of the memory that tensors point at, and of contents. Both are all or nothing.

Owns the swap and its undo after an error. Which memories there are is the target's; when they are swapped is worker/commit's.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import Torn
from liveweight.plan.copies import COLUMNS
from liveweight.spec.row_table import Table
from liveweight.worker.staging import cut

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 128 << 10
"""What is swapped at a time. A batch of rows has less than two chunks: with its bounce buffer it stays in a core's cache."""

LINK_CHUNK_BYTES = 2 << 20
"""The same between a device and the host: each copy has a launch cost, which would dominate small copies."""


def point(
    holders: Sequence[torch.Tensor], at: Sequence[torch.Tensor], *, before: Sequence[torch.Tensor]
) -> None:
    """Let every holder, which keeps its identity and flags, read the memory of its counterpart. `before` is where they point now.

    If one cannot, all point back when the error is raised.
    """
    try:
        for holder, view in zip(holders, at, strict=True):
            holder.data = view
    except BaseException as error:
        _point_back(holders, before, error)
        raise


def _point_back(
    holders: Sequence[torch.Tensor], before: Sequence[torch.Tensor], cause: BaseException
) -> None:
    try:
        for holder, view in zip(holders, before, strict=True):
            if holder.data_ptr() != view.data_ptr():
                holder.data = view
    except BaseException as error:
        raise Torn(f"swap failed ({cause}), and so did the way back: {error}") from error


class _Step(enum.Enum):
    """The step that a lane has begun with its batch."""

    SAVE = enum.auto()  # live to bounce buffer
    OVERWRITE = enum.auto()  # shadow to live
    BRING = enum.auto()  # bounce buffer to shadow


class ContentSwap:
    """Swaps the bytes of two sets of memories in place, in `threads` threads: addresses that others hold stay valid.

    Everything is bound when it is made. It keeps both sets alive. The live set and the bounce buffers, of less than two chunks in each
    thread, are on `device`, and `kernels` write there; the shadow is there too, or where `to_shadow` writes.
    """

    def __init__(
        self,
        live: Sequence[Memory],
        shadow: Sequence[Memory],
        *,
        kernels: Kernels,
        threads: int,
        device: Device = CPU,
        to_shadow: Kernels | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        to_shadow = kernels if to_shadow is None else to_shadow
        sizes = np.array([memory.size_bytes for memory in live], dtype=np.int64)
        pieces = _chunks(sizes, chunk_bytes)
        self._ends = cut(pieces[:, 2], chunk_bytes)
        self._lanes = max(1, min(threads, len(self._ends)))
        # Two chunks hold any batch: `cut` ends one with the row that reaches a chunk's bytes.
        buffers = device.allocate([2 * chunk_bytes] * self._lanes, "bounce buffers")
        bounce = list(map(Memory.of_view, buffers))
        here, there = pieces[:, :2], self._bounce_places(pieces[:, 2])
        sizes = pieces[:, 2]
        self._save = kernels.bind_copy(_rows(here, there, sizes), live, bounce)
        self._overwrite = kernels.bind_copy(_rows(here, here, sizes), shadow, live)
        self._bring = to_shadow.bind_copy(_rows(there, here, sizes), bounce, shadow)
        self._restore_live = kernels.bind_copy(_rows(there, here, sizes), bounce, live)
        self._restore_shadow = to_shadow.bind_copy(_rows(here, here, sizes), live, shadow)
        self._at = [(lane, _Step.SAVE) for lane in range(self._lanes)]

    def run(self) -> None:
        """Swap; its own inverse. On an error in any thread everything done is swapped back, then it is raised."""
        halt = threading.Event()
        self._at = [(lane, _Step.SAVE) for lane in range(self._lanes)]

        def work(lane: int) -> None:
            try:
                for batch in range(lane, len(self._ends), self._lanes):
                    if halt.is_set():
                        return
                    self._swap(lane, batch)
            except BaseException:
                halt.set()
                raise

        try:
            with CopyThreads(self._lanes, name="liveweight-swap") as copy_threads:
                copy_threads.run(work)
        except BaseException as error:
            self._swap_back(error)
            raise

    def _swap(self, lane: int, batch: int) -> None:
        """One batch. The step is noted before it is begun, so that the way back is known wherever an error strikes."""
        first, last = self._bounds(batch)
        self._at[lane] = (batch, _Step.SAVE)
        self._save.run(first, last)
        self._at[lane] = (batch, _Step.OVERWRITE)
        self._overwrite.run(first, last)
        self._at[lane] = (batch, _Step.BRING)
        self._bring.run(first, last)
        self._at[lane] = (batch + self._lanes, _Step.SAVE)

    def _swap_back(self, cause: BaseException) -> None:
        try:
            for lane, (batch, step) in enumerate(tuple(self._at)):
                self._give_up(batch, step)
                for done in range(lane, batch, self._lanes):
                    self._swap(lane, done)
        except BaseException as error:
            raise Torn(f"swap failed ({cause}), and so did the way back: {error}") from error

    def _give_up(self, batch: int, step: _Step) -> None:
        """Undo a batch that was begun. A step that had come to its end is undone as well."""
        match step:
            case _Step.SAVE:
                return
            case _Step.OVERWRITE:
                self._restore_live.run(*self._bounds(batch))
            case _Step.BRING:  # live holds all of the shadow's bytes, the bounce buffer all of live's
                self._restore_shadow.run(*self._bounds(batch))
                self._restore_live.run(*self._bounds(batch))

    def _bounds(self, batch: int) -> tuple[int, int]:
        return int(self._ends[batch - 1]) if batch else 0, int(self._ends[batch])

    def _bounce_places(self, sizes: Table) -> Table:
        """For each row the bounce buffer, which is its lane's, and the offset there."""
        batches = np.searchsorted(self._ends, np.arange(len(sizes)), side="right")
        before = np.cumsum(sizes) - sizes
        starts = np.concatenate([[0], self._ends[:-1]]).astype(np.int64)[: len(self._ends)]
        offsets = before - before[starts][batches] if len(sizes) else before
        return np.stack([batches % self._lanes, offsets], axis=1)


def _chunks(sizes: Table, chunk_bytes: int) -> Table:
    """Memories of these sizes in chunks: one row (memory, offset, size) each."""
    pieces = -(-sizes // chunk_bytes)
    memory = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(memory)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * chunk_bytes
    return np.stack([memory, offset, np.minimum(chunk_bytes, sizes[memory] - offset)], axis=1).astype(
        np.int64
    )


def _rows(sources: Table, targets: Table, sizes: Table) -> Table:
    """A copy table of plain runs of bytes; places are (memory, offset)."""
    rows = np.zeros((len(sizes), len(COLUMNS)), dtype=np.int64)
    rows[:, 0:2], rows[:, 2:4] = sources, targets
    rows[:, 4] = rows[:, 7] = 1
    rows[:, 10] = sizes
    return rows
