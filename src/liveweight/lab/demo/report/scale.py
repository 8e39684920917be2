"""Axes: from values to places on a chart, and the ticks beside it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 16, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values from `low` to `high` lie between two places; `log` by their logarithm."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self._measured(self.low), self._measured(self.high), self._measured(value)
        share = (at - low) / (high - low) if high > low else 0.0
        return round(self.begin + min(1.0, max(0.0, share)) * (self.end - self.begin), 2)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values between both ends."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, -(-(last - first + 1) // count))
            return [10.0**power for power in range(first, last + 1, every)]
        step = _round_up((self.high - self.low) / count)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def written(self, value: float) -> str:
        """A tick as it is shown."""
        return f"{value:.0e}" if self.log else f"{value:g}"

    def _measured(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value


def across(low: float, high: float) -> Scale:
    """Left to right over a chart."""
    return Scale(low=low, high=high, begin=LEFT, end=WIDTH - RIGHT)


def upward(low: float, high: float, *, height: float = HEIGHT, log: bool = False) -> Scale:
    """Bottom to top of a chart."""
    return Scale(low=low, high=high, begin=height - BOTTOM, end=TOP, log=log)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not smaller."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9)), value)
