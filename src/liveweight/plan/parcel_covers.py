"""Covers: which parcels of several streams make up each tensor once, so that digests taken while they are packed add up to its own.

Streams come from ranks of any replicas: regions may be the same (copies), disjoint, or overlap in part (another number of ranks).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from liveweight.spec.layout import Layout
from liveweight.spec.region import Region, intersection

Mask = npt.NDArray[np.bool_]


def covers(streams: Sequence[Layout]) -> list[Mask]:
    """For every stream, which of its placements count: each that shares no element with one that was chosen before."""
    chosen: dict[str, dict[Region, None]] = defaultdict(dict)
    masks = []
    for stream in streams:
        mask = np.zeros(len(stream.placements), dtype=np.bool_)
        for number, parcel in enumerate(stream.placements):
            known = chosen[parcel.name]
            if parcel.region not in known and not _overlaps(parcel.region, known):
                known[parcel.region] = None
                mask[number] = True
        masks.append(mask)
    return masks


def _overlaps(region: Region, others: dict[Region, None]) -> bool:
    """Whether it shares elements with one of them. Most lie before or behind it in their first dimension."""
    if not region:
        return bool(others)
    first, last = region[0].start, region[0].last
    return any(
        other[0].start <= last and other[0].last >= first and intersection(region, other) is not None
        for other in others
    )
