"""The rank's own reading of its weights: digests of what lies in memory, through the target's declaration.

Made from the layout alone, never from a copy plan, so that a wrong plan shows as well. What the digests are compared with is the
leader's matter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from liveweight.devices.crew import Crew
from liveweight.devices.kernels import BoundDigest, Kernels
from liveweight.devices.memory import Memory
from liveweight.plan.digests import plan_digests, row_bytes, split
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout
from liveweight.worker.staging import SMALLEST_BATCH_BYTES, Stop, Stopped, share

ROW_BYTES = 2 << 20
BATCH_LANES = 32
"""A batch reads at least so many times the bytes of a result: every call gives digests of all slots, which are then added up."""

KEPT = 2
"""Sets of memory whose reading is kept bound: live and shadow, which change places."""


class ShadowDigest:
    """Digests memories that a layout describes: the shadow before a vote, or what is live now. Used by one thread at a time."""

    def __init__(self, layout: Layout, kernels: Kernels) -> None:
        plan = plan_digests(layout)
        self._rows, self._slots = split(plan.rows, ROW_BYTES), plan.slots
        self._sizes_bytes = row_bytes(self._rows)
        self._kernels = kernels
        self._bound: list[tuple[Sequence[Memory], BoundDigest]] = []

    def of(
        self, memories: Sequence[Memory], *, crew: Crew, stop: Stop, deadline: Deadline
    ) -> Lanes | Stopped:
        """The digest of every placement of the layout, in its order; or Stopped. Raises DeadlineExceeded."""
        bound = self._binding(memories)
        sums = [np.zeros((self._slots, SEEDS), dtype=np.uint32) for _ in range(crew.threads)]

        def read(lane: int, first: int, last: int) -> None:
            sums[lane] += bound.run(first, last)

        outcome = share(
            self._sizes_bytes,
            read,
            crew=crew,
            stop=stop,
            deadline=deadline,
            what="verifying",
            smallest_batch_bytes=max(SMALLEST_BATCH_BYTES, BATCH_LANES * sums[0].nbytes),
        )
        if isinstance(outcome, Stopped):
            return outcome
        total: Lanes = np.sum(sums, axis=0, dtype=np.uint32)
        return total

    def forget(self) -> None:
        """Let go of all memories. Called before they are given back: what is bound keeps them alive."""
        self._bound.clear()

    def _binding(self, memories: Sequence[Memory]) -> BoundDigest:
        """The reading bound to exactly these memories; the least recently used set makes room."""
        for number, (known, bound) in enumerate(self._bound):
            if len(known) == len(memories) and all(map(operator.is_, known, memories)):
                self._bound.append(self._bound.pop(number))
                return bound
        bound = self._kernels.bind_digest(self._rows, memories, self._slots)
        self._bound = [*self._bound, (tuple(memories), bound)][-KEPT:]
        return bound
