"""Figures from the times of rounds: best and median of each contender, and its ratio to the limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeAlias

from liveweight.observe.events import OfferKind

Times: TypeAlias = dict[tuple[OfferKind, bool], list[float]]
"""Seconds of every round, by its offer and whether it was verified."""


def rounds_of(times: Times) -> dict[str, Any]:
    """By offer, then plain or verified."""
    figures: dict[str, Any] = {}
    for (kind, verify), taken in times.items():
        name = "verified_s" if verify else "plain_s"
        figures.setdefault(kind, {})[name] = figures_of(taken)
    return figures


def figures_of(taken: list[float]) -> dict[str, float]:
    """Of one contender."""
    return {"best": min(taken), "median": statistics.median(taken)}


def ratios_of(
    times: Times,
    limit_s: float,
    of: Callable[[list[float]], float] = min,
) -> dict[str, float]:
    """The ratio of each contender's best round, or of another figure chosen by `of`, to the limit."""
    return {
        f"{kind}_{'verified' if verify else 'plain'}": of(taken) / limit_s
        for (kind, verify), taken in times.items()
    }
