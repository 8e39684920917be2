"""Owners: which of several sources fills which part of a target.

A trainer's ranks hold regions of the same tensors, disjoint ones or copies. Of copies any one is read, and a reader spreads over them.
Pure: the parts are layouts of their own, over the memories of the target, and each is then planned like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan.copies import part_offset_and_strides
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, canonical, count, intersection, show

_Owners: TypeAlias = dict[Region, list[int]]


def divide(target: Layout, sources: Sequence[Layout], *, prefer: int = 0) -> tuple[Layout | None, ...]:
    """For each source, the part of the target that it fills; None for one that is not needed.

    Of several sources with the same region, the one with the fewest bytes so far is taken; among equals, `prefer` says where to begin.
    Raises ManifestMismatch for a tensor that no source has, LayoutInvalid where regions do not cover the target's.
    """
    division = _Division.of(sources, prefer)
    for placement, spec in zip(target.placements, _specs(target), strict=True):
        division.fill(placement, spec)
    return tuple(_part(target, placements) for placements in division.parts)


@dataclass(slots=True, kw_only=True)
class _Division:
    """Which sources have which regions, and which parts each has been assigned so far."""

    names: dict[str, str]
    owners: dict[str, _Owners]
    prefer: int
    parts: list[list[Placement]]
    loads_bytes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sources: Sequence[Layout], prefer: int) -> _Division:
        names: dict[str, str] = {}
        owners: dict[str, _Owners] = defaultdict(dict)
        for number, source in enumerate(sources):
            specs = source.specs()
            for spec in source.tensors:
                names.update(dict.fromkeys(spec.names, spec.name))
            for placement in source.placements:
                regions = owners[specs[placement.name].name]
                regions.setdefault(canonical(placement.region), []).append(number)
        return cls(
            names=names,
            owners=owners,
            prefer=prefer,
            parts=[[] for _ in sources],
            loads_bytes=[0] * len(sources),
        )

    def fill(self, placement: Placement, spec: TensorSpec) -> None:
        """Assign every part of a placement to one of the sources that have it."""
        name = next((self.names[name] for name in spec.names if name in self.names), None)
        if name is None:
            raise ManifestMismatch([f"{spec.name} missing"])
        wanted, filled = count(placement.region), 0
        for region, numbers in self.owners.get(name, {}).items() if wanted else ():
            shared = intersection(region, placement.region)
            if shared is not None:
                filled += count(shared)
                self._assign(self._lightest(numbers), placement, shared, spec)
        if filled != wanted:
            problem = "do not offer all of" if filled < wanted else "offer more than once parts of"
            raise LayoutInvalid(f"{spec.name}: the sources {problem} {show(placement.region)}")

    def _lightest(self, numbers: Sequence[int]) -> int:
        turned = (self.prefer % len(numbers) + turn for turn in range(len(numbers)))
        return min((numbers[at % len(numbers)] for at in turned), key=lambda number: self.loads_bytes[number])

    def _assign(self, number: int, placement: Placement, shared: Region, spec: TensorSpec) -> None:
        offset_bytes, strides_bytes = part_offset_and_strides(placement, shared)
        self.loads_bytes[number] += count(shared) * spec.dtype.size_bytes
        self.parts[number].append(
            Placement(
                name=placement.name,
                region=shared,
                memory=placement.memory,
                offset_bytes=offset_bytes,
                strides_bytes=tuple(strides_bytes),
            )
        )


def _specs(target: Layout) -> list[TensorSpec]:
    specs = target.specs()
    return [specs[placement.name] for placement in target.placements]


def _part(target: Layout, placements: Sequence[Placement]) -> Layout | None:
    """The target's memories with these placements alone."""
    if not placements:
        return None
    specs = target.specs()
    tensors = {specs[placement.name].name: specs[placement.name] for placement in placements}
    return Layout(
        tensors=tuple(tensors.values()),
        memories_bytes=target.memories_bytes,
        placements=tuple(placements),
    )
