"""Digests of the bytes that have landed in the shadow, computed by a separate thread while the rest is being staged.

A row is digested as soon as every copy that touches its bytes is done; the remaining rows are digested when staging ends. Which bytes
are digested is shadow_digest's.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from liveweight.devices.copy_threads import CopyThreads, run_once
from liveweight.devices.kernels import BoundDigest, Kernels
from liveweight.devices.memory import Memory
from liveweight.plan.digest_order import copies_before
from liveweight.plan.digests import row_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.row_table import Table
from liveweight.worker.staging import BATCH_BYTES, POLL_S, Outcome, StagingStopped, Stop, run_batches


class Readings:
    """The rows of a digest table in the order in which copies let them be made, bound to a shadow. Kept across rounds."""

    def __init__(
        self, rows: Table, copies: Table, slots: int, shadow: Sequence[Memory], kernels: Kernels
    ) -> None:
        before = copies_before(rows, copies)
        order = np.argsort(before, kind="stable")
        self.copies, self.shadow, self.slots = copies, tuple(shadow), slots
        self.before: Table = before[order]
        self.sizes_bytes: Table = row_bytes(rows[order])
        self.bound: BoundDigest = kernels.bind_digest(rows[order], shadow, slots)

    def fit(self, copies: Table, shadow: Sequence[Memory]) -> bool:
        """Whether they are of exactly these copies and memories."""
        same = len(self.shadow) == len(shadow) and all(map(operator.is_, self.shadow, shadow))
        return same and (self.copies is copies or np.array_equal(self.copies, copies))


class DigestWhileStaging:
    """One round's digests. `landed` is called by the lanes that stage; a separate thread digests meanwhile; `finish` comes afterwards."""

    def __init__(self, readings: Readings, copy_threads: CopyThreads, *, smallest_batch_bytes: int) -> None:
        self._readings, self._copy_threads, self._smallest = readings, copy_threads, smallest_batch_bytes
        self._sums = [
            np.zeros((readings.slots, SEEDS), dtype=np.uint32) for _ in range(copy_threads.threads + 1)
        ]
        self._bytes_before = np.concatenate([[0], np.cumsum(readings.sizes_bytes)])
        self._changed = threading.Condition()
        self._done: dict[int, int] = {}
        self._copied = self._taken = 0
        self._over = False

    @property
    def concurrent(self) -> Self:
        """See Digesting."""
        return self

    def landed(self, first: int, last: int) -> None:
        """Copies [first, last) are done."""
        with self._changed:
            self._done[first] = last
            while self._copied in self._done:
                self._copied = self._done.pop(self._copied)
            self._changed.notify_all()

    def during(self, work: Callable[[], Outcome]) -> Outcome:
        """See ConcurrentWork."""
        outcome: list[Outcome] = []

        def run(lane: int) -> None:
            if lane:
                self._digest()
                return
            try:
                outcome.append(work())
            finally:
                with self._changed:
                    self._over = True
                    self._changed.notify_all()

        run_once(2, run, name="liveweight-digest")
        return outcome[0]

    def finish(self, *, stop: Stop, deadline: Deadline) -> Lanes | StagingStopped:
        """The digest of every placement. Called once all copies are done; digests the remaining rows."""
        left, begin = self._readings.bound, self._taken

        def read(lane: int, first: int, last: int) -> None:
            self._sums[lane] += left.run(begin + first, begin + last)

        outcome = run_batches(
            self._readings.sizes_bytes[begin:],
            read,
            copy_threads=self._copy_threads,
            stop=stop,
            deadline=deadline,
            what="verifying",
            smallest_batch_bytes=self._smallest,
        )
        total: Lanes = np.sum(self._sums, axis=0, dtype=np.uint32)
        return outcome if isinstance(outcome, StagingStopped) else total

    def _digest(self) -> None:
        """The thread's work, until nothing is copied any more."""
        while (found := self._next()) is not None:
            self._sums[-1] += self._readings.bound.run(*found)

    def _next(self) -> tuple[int, int] | None:
        """Readings that can be made, as soon as they are worth a call; None: it is over."""
        with self._changed:
            while not self._over:
                begin, end = self._taken, self._ready()
                if self._bytes_before[end] - self._bytes_before[begin] >= self._smallest:
                    self._taken = end
                    return begin, end
                self._changed.wait(POLL_S)
        return None

    def _ready(self) -> int:
        """How many readings can be made by now, at most a batch more than were taken."""
        ready = int(np.searchsorted(self._readings.before, self._copied, side="right"))
        batch = np.searchsorted(
            self._bytes_before, self._bytes_before[self._taken] + BATCH_BYTES, side="right"
        )
        return max(self._taken, min(ready, max(self._taken + 1, int(batch) - 1)))
