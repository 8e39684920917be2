"""Digests of a rank's weights in memory, shadow or live.

Planned from the target's layout alone, never from a copy plan, so that a wrong copy plan shows as well. The comparison of the digests
is the leader's (rounds/leader/staging_reports, audit_verdicts).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import BoundDigest, Kernels
from liveweight.devices.memory import Memory
from liveweight.plan.digests import plan_digests, row_bytes, split
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.port import Reading
from liveweight.worker.digest_while_staging import DigestWhileStaging, Readings
from liveweight.worker.staging import (
    SMALLEST_BATCH_BYTES,
    ConcurrentWork,
    Pace,
    StagingStopped,
    Stop,
    run_batches,
)

ROW_BYTES = 2 << 20
BATCH_LANES = 32
"""A batch reads at least this many times the bytes of a result: every call returns digests of all slots, which are then added up."""

KEPT = 2
"""How many sets of memory stay bound: live and shadow, which change places."""


class Digesting(Protocol):
    """The digest of a shadow that a round fills."""

    @property
    def concurrent(self) -> ConcurrentWork | None:
        """The work that runs while the shadow fills; None if there is none."""

    def finish(self, *, stop: Stop, deadline: Deadline) -> Lanes | StagingStopped:
        """Once all copies are done: the digest of every placement of the layout, in its order."""


class ShadowDigest:
    """Digests memories that a layout describes: the shadow before a vote, or live weights. Used by one thread at a time."""

    def __init__(self, layout: Layout, kernels: Kernels) -> None:
        plan = plan_digests(layout)
        self._rows, self._slots = split(plan.rows, ROW_BYTES), plan.slots
        specs = layout.specs()
        self._names = [specs[placement.name].name for placement in layout.placements]
        self._sizes_bytes = row_bytes(self._rows)
        self._kernels = kernels
        self._bound: list[tuple[Sequence[Memory], BoundDigest]] = []
        self._readings: list[Readings] = []
        lane_bytes = self._slots * SEEDS * np.dtype(np.uint32).itemsize
        self._smallest_batch_bytes = max(SMALLEST_BATCH_BYTES, BATCH_LANES * lane_bytes)

    def of(
        self,
        memories: Sequence[Memory],
        *,
        copy_threads: CopyThreads,
        stop: Stop,
        deadline: Deadline,
        names: Collection[str] | None = None,
        pace: Pace | None = None,
    ) -> Lanes | StagingStopped:
        """The digest of every placement of the layout, in its order; or StagingStopped. Raises DeadlineExceeded.

        With `names`, of those tensors alone: the others' are zero.
        """
        lanes, outcome = self._read(memories, copy_threads, stop, deadline, names=names, pace=pace)
        return outcome if isinstance(outcome, StagingStopped) else lanes

    def all_of(self, memories: Sequence[Memory], *, copy_threads: CopyThreads, deadline: Deadline) -> Lanes:
        """The same as `of`, without a stop."""
        return self._read(memories, copy_threads, lambda: False, deadline)[0]

    def begin(
        self, reading: Reading, memories: Sequence[Memory], copy_threads: CopyThreads, *, ahead: bool
    ) -> Digesting:
        """The digest of what this reading fills: taken afterwards or, with `ahead`, as far as possible meanwhile."""
        return (
            self._ahead(reading.rows, memories, copy_threads)
            if ahead
            else DigestAfterStaging(self, memories, copy_threads)
        )

    def _ahead(
        self, copies: Table, memories: Sequence[Memory], copy_threads: CopyThreads
    ) -> DigestWhileStaging:
        found = next((known for known in self._readings if known.fit(copies, memories)), None)
        if found is None:
            found = Readings(self._rows, copies, self._slots, memories, self._kernels)
        self._readings = [*(known for known in self._readings if known is not found), found][-KEPT:]
        return DigestWhileStaging(found, copy_threads, smallest_batch_bytes=self._smallest_batch_bytes)

    def forget(self) -> None:
        """Release all memories. Called before they are given back: bound tables keep them alive."""
        self._bound.clear()
        self._readings.clear()

    def _read(
        self,
        memories: Sequence[Memory],
        copy_threads: CopyThreads,
        stop: Stop,
        deadline: Deadline,
        *,
        names: Collection[str] | None = None,
        pace: Pace | None = None,
    ) -> tuple[Lanes, int | StagingStopped]:
        """The sums so far, and whether they are of everything."""
        if names is None:
            bound, sizes_bytes = self._binding(memories), self._sizes_bytes
        else:
            rows = self._rows[np.isin(self._rows[:, -1], self._slots_of(names))]
            bound, sizes_bytes = self._kernels.bind_digest(rows, memories, self._slots), row_bytes(rows)
        sums = [np.zeros((self._slots, SEEDS), dtype=np.uint32) for _ in range(copy_threads.threads)]

        def read(lane: int, first: int, last: int) -> None:
            sums[lane] += bound.run(first, last)

        outcome = run_batches(
            sizes_bytes,
            read,
            copy_threads=copy_threads,
            stop=stop,
            deadline=deadline,
            what="verifying",
            pace=pace,
            smallest_batch_bytes=self._smallest_batch_bytes,
        )
        total: Lanes = np.sum(sums, axis=0, dtype=np.uint32)
        return total, outcome

    def _slots_of(self, names: Collection[str]) -> list[int]:
        """The placements of these tensors."""
        return [slot for slot, name in enumerate(self._names) if name in names]

    def _binding(self, memories: Sequence[Memory]) -> BoundDigest:
        """The reading bound to exactly these memories; the least recently used set makes room."""
        for number, (known, bound) in enumerate(self._bound):
            if len(known) == len(memories) and all(map(operator.is_, known, memories)):
                self._bound.append(self._bound.pop(number))
                return bound
        bound = self._kernels.bind_digest(self._rows, memories, self._slots)
        self._bound = [*self._bound, (tuple(memories), bound)][-KEPT:]
        return bound


@dataclass(frozen=True, slots=True)
class DigestAfterStaging:
    """A Digesting that reads everything after staging."""

    digest: ShadowDigest
    memories: Sequence[Memory]
    copy_threads: CopyThreads
    concurrent: ConcurrentWork | None = None

    def finish(self, *, stop: Stop, deadline: Deadline) -> Lanes | StagingStopped:
        """See Digesting."""
        return self.digest.of(self.memories, copy_threads=self.copy_threads, stop=stop, deadline=deadline)
