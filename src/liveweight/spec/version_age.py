"""The age of versions: which of several is the newest, judged by their labels and by how long they have served. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from liveweight.spec.manifest import Version

START_RUN = "start"
"""The run of what an engine was started on: older than anything that was published."""


def older(one: Version, other: Version) -> bool:
    """Whether a version is known to be older than another: of the same run, with a smaller number at the end of its label."""
    numbers = [_number(version) for version in (one, other)]
    if one.run != other.run or None in numbers:
        return False
    return (numbers[0] or 0) < (numbers[1] or 0)


def newest(served: Iterable[tuple[Version, float]]) -> Version | None:
    """Of versions, each with the seconds for which it has served somewhere, the one that the others are behind. None: nothing was
    published.

    By the numbers of their labels within a run; where those do not decide, by which came last.
    """
    best: tuple[Version, float] | None = None
    for one in served:
        if one[0].run == START_RUN:
            continue
        if best is None or older(best[0], one[0]) or (not older(one[0], best[0]) and one[1] < best[1]):
            best = one
    return None if best is None else best[0]


def _number(version: Version) -> int | None:
    if isinstance(version.label, int):
        return version.label
    found = re.search(r"\d+$", version.label)
    return None if found is None else int(found[0])
