"""The restart budget: how often ranks may be restarted within a time, and in a row without success. Pure."""

from __future__ import annotations

from collections import deque

from liveweight.engine.config import Restarts
from liveweight.errors import LiveWeightError, RankLost


class RestartBudget:
    """Counts one engine's starts. Used by one thread."""

    def __init__(self, allowed: Restarts) -> None:
        self._allowed = allowed
        self._begun: deque[float] = deque()
        self._in_a_row = self.restarts = 0

    def spend(self, now_s: float, cause: LiveWeightError) -> None:
        """Count one more start. RankLost, with the earlier starts and the cause, if it would be one too many."""
        allowed, begun = self._allowed, self._begun
        while begun and begun[0] <= now_s - allowed.window_s:
            begun.popleft()
        if self._in_a_row >= allowed.attempts:
            raise RankLost(f"gave up after {self._in_a_row} starts in a row that failed; the last: {cause}")
        if len(begun) >= allowed.limit:
            often = f"{len(begun)} restarts within {now_s - begun[0]:.0f} s"
            raise RankLost(f"gave up after {often}; the last rank was lost so: {cause}")
        begun.append(now_s)
        self._in_a_row += 1
        self.restarts += 1

    def wait_s(self) -> float:
        """Seconds to wait before the counted start: 0 before the first in a row, `wait_s` before the second, then doubling."""
        tries = self._in_a_row - 2
        return 0.0 if tries < 0 else self._allowed.wait_s * 2.0**tries

    def succeeded(self) -> None:
        """The ranks serve."""
        self._in_a_row = 0
