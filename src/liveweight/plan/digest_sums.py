"""Digest sums: how the partial digests of a replica's ranks become the digests of full tensors.

Made once per set of rank layouts: regions that overlap in part, or leave elements without an owner, are refused here, before any
round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from liveweight.errors import LayoutInvalid, ManifestMismatch, MessageInvalid
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import Region, canonical, check_tiling

KEPT = -1
"""In place of an offered tensor's number: the expected one is filled from none, and stays as it is."""


class DigestSums:
    """The ranks' placements, grouped by tensor and region. Equal regions must agree; disjoint ones add up."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.expected = _union(layouts)
        numbers = {spec.name: number for number, spec in enumerate(self.expected)}
        regions: dict[int, dict[Region, int]] = defaultdict(dict)
        self._groups: list[npt.NDArray[np.int64]] = []
        tensors: list[int] = []
        for layout in layouts:
            specs, groups = layout.specs(), []
            for placement in layout.placements:
                number, region = numbers[specs[placement.name].name], canonical(placement.region)
                group = regions[number].setdefault(region, len(tensors))
                if group == len(tensors):
                    tensors.append(number)
                groups.append(group)
            self._groups.append(np.array(groups, dtype=np.int64))
        for number, spec in enumerate(self.expected):
            check_tiling(spec.name, list(regions[number]), spec.shape)
        self._tensors = np.array(tensors, dtype=np.int64)

    def combine(self, partials: Sequence[Lanes]) -> tuple[Lanes, list[str]]:
        """Digests of the expected tensors from one array of partials per rank; names of those whose copies disagree."""
        sums = np.zeros((len(self._tensors), SEEDS), dtype=np.uint32)
        for groups, lanes in zip(self._groups, partials, strict=True):
            sums[groups] = lanes
        torn = set()
        for groups, lanes in zip(self._groups, partials, strict=True):
            torn.update(self._tensors[groups[(sums[groups] != lanes).any(axis=1)]].tolist())
        totals = np.zeros((len(self.expected.tensors), SEEDS), dtype=np.uint32)
        np.add.at(totals, self._tensors, sums)
        return totals, [self.expected.tensors[number].name for number in sorted(torn)]

    def of_placements(self, rank: int) -> npt.NDArray[np.int64]:
        """The numbers of the tensors that a rank's placements are of."""
        return self._tensors[self._groups[rank]]

    def parts_of(self, totals: Lanes, partials: Sequence[Lanes]) -> list[Lanes]:
        """What the partials would be if the tensors had these digests, as far as that follows: where a part is a whole tensor."""
        whole = np.bincount(self._tensors, minlength=len(totals)) == 1
        tensors = [self.of_placements(rank) for rank in range(len(partials))]
        return [
            np.where(whole[numbers][:, None], totals[numbers], lanes)
            for numbers, lanes in zip(tensors, partials, strict=True)
        ]

    def differing_ranks(self, partials: Sequence[Lanes], parts: Sequence[Lanes]) -> Mapping[int, list[int]]:
        """By tensor number, the ranks whose partials differ from these parts."""
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, (groups, lanes, own) in enumerate(zip(self._groups, partials, parts, strict=True)):
            for number in np.unique(self._tensors[groups[(lanes != own).any(axis=1)]]).tolist():
                ranks[number].append(rank)
        return ranks

    def sources(self, offered: Manifest, kept: Collection[str] = ()) -> npt.NDArray[np.int64]:
        """For every expected tensor, the number of the offered one that it is filled from; KEPT for those that are `kept`."""
        numbers = {name: number for number, spec in enumerate(offered) for name in spec.names}
        found = (KEPT if spec.name in kept else _find(numbers, spec) for spec in self.expected)
        return np.array(list(found), dtype=np.int64)

    def differing(
        self, totals: Lanes, offered: Lanes, sources: npt.NDArray[np.int64] | None = None
    ) -> list[str]:
        """Names of the expected tensors whose digest is not the offered one (both in the expected order).

        Those that `sources` says are kept have no offered one, and are not compared.
        """
        wrong = (totals != offered).any(axis=1)
        if sources is not None:
            wrong &= sources != KEPT
        return [self.expected.tensors[i].name for i in np.flatnonzero(wrong)]


def _find(numbers: Mapping[str, int], spec: TensorSpec) -> int:
    for name in spec.names:
        if name in numbers:
            return numbers[name]
    raise ManifestMismatch([f"{spec.name} missing"])


def _union(layouts: Sequence[Layout]) -> Manifest:
    """All tensors that the ranks own parts of; they must agree about each."""
    specs: dict[str, TensorSpec] = {}
    for layout in layouts:
        for spec in layout.tensors:
            known = specs.setdefault(spec.name, spec)
            if (known.dtype, known.shape, known.aliases) != (spec.dtype, spec.shape, spec.aliases):
                raise LayoutInvalid(f"{spec.name}: ranks disagree, {known.describe()} and {spec.describe()}")
    return Manifest(tensors=tuple(specs.values()))


def lanes_to_bytes(lanes: Lanes) -> bytes:
    """Lanes as bytes of a message: 16 bytes each, little-endian."""
    return lanes.astype("<u4").tobytes()


def lanes_from_bytes(data: bytes, rows: int) -> Lanes:
    """What `lanes_to_bytes` wrote; MessageInvalid unless it is that many."""
    if len(data) != rows * SEEDS * 4:
        raise MessageInvalid(f"{len(data)} bytes are not {rows} digests")
    return np.frombuffer(data, dtype="<u4").reshape(rows, SEEDS).astype(np.uint32)
