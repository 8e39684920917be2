"""The age of versions: which of several is the newest, judged by their numbers and by how long they have served. Pure.

Labels tell nothing about age: they are compared as texts, and a run may use them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

from liveweight.spec.manifest import Version

START_RUN = "start"
"""The run of what an engine was started on: older than anything that was published."""


def older(one: Version, other: Version) -> bool:
    """Whether a version is known to be older than another: of the same run, with a smaller number."""
    if one.run != other.run or one.number is None or other.number is None:
        return False
    return one.number < other.number


def newest(served: Iterable[tuple[Version, float]]) -> Version | None:
    """Of versions, each with the seconds for which it has served somewhere, the one that the others are behind. None: nothing was
    published.

    By their numbers within a run; where those do not decide, by which came last.
    """
    best: tuple[Version, float] | None = None
    for one in served:
        if one[0].run == START_RUN:
            continue
        if best is None or older(best[0], one[0]) or (not older(one[0], best[0]) and one[1] < best[1]):
            best = one
    return None if best is None else best[0]


def newest_of_run(run: str, served: Iterable[Version | None]) -> Version | None:
    """The version of that run with the highest number; None if none of them has a number."""
    numbered = [one for one in served if one is not None and one.run == run and one.number is not None]
    return max(numbered, key=lambda one: one.number or 0, default=None)
