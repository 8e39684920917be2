"""Parcel plans: how a rank's regions travel through a ring, packed into buckets that are handed over one after the other.

A parcel is a region that lies in one placement of the source and one of the target, packed row by row. Buckets are filled in the
target's order; what does not fit into the rest of one is cut, so a tensor may be larger than a bucket, and than the whole ring. Both
sides derive what they move from the same layout, in which a bucket is a memory: the source packs, the rank copies out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan.copies import COLUMNS, copy_rows, part_offset_and_strides
from liveweight.spec.layout import ALIGNMENT_BYTES, Layout, Placement, align
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, Span, canonical, count, counts, intersection, show
from liveweight.spec.row_table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ParcelPlan:
    """`stream`: the parcels, placed in buckets. `rows`: the copies (plan/copies) out of them, bucket by bucket. `homes`: the same as
    (parcel, the placement that it fills a part of)."""

    stream: Layout
    rows: Table
    homes: tuple[tuple[Placement, Placement], ...]


def plan_parcels(source: Layout, target: Layout, bucket_bytes: int) -> ParcelPlan:
    """The parcels that fill every placement of the target, in buckets of at most that size.

    Raises ManifestMismatch for a tensor that the source lacks or has otherwise, LayoutInvalid where its regions do not cover the target's.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"buckets of {bucket_bytes} bytes")
    held, names, specs = _by_tensor(source), source.specs(), target.specs()
    build, tables, homes = _Build(bucket_bytes), list[Table](), list[tuple[Placement, Placement]]()
    for placement in target.placements:
        spec = _offered(names, specs[placement.name])
        for parcel in _parcels(build, held[spec.name], placement, spec):
            tables.append(copy_rows(parcel, placement, parcel.region, spec.dtype.size_bytes))
            homes.append((parcel, placement))
    rows = np.concatenate(tables) if tables else np.empty((0, len(COLUMNS)), dtype=np.int64)
    stream = Layout(
        tensors=source.tensors, memories_bytes=tuple(build.sizes_bytes), placements=tuple(build.placements)
    )
    return ParcelPlan(stream=stream, rows=rows[np.argsort(rows[:, 0], kind="stable")], homes=tuple(homes))


def cut_out(held: Layout, stream: Layout) -> Layout:
    """Where the parcels of a stream lie in what a source holds, one placement each, in the stream's order.

    LayoutInvalid where a parcel lies in no one placement of the source.
    """
    found, names = _by_tensor(held), held.specs()
    placements = []
    for parcel in stream.placements:
        spec = names.get(parcel.name)
        home = next((p for p in found[spec.name] if _inside(parcel.region, p.region)), None) if spec else None
        if home is None:
            raise LayoutInvalid(f"{parcel.name}: the source does not hold {show(parcel.region)} in one place")
        offset, strides = part_offset_and_strides(home, parcel.region)
        placements.append(
            Placement(
                name=parcel.name,
                region=parcel.region,
                memory=home.memory,
                offset_bytes=offset,
                strides_bytes=tuple(strides),
            )
        )
    return Layout(tensors=held.tensors, memories_bytes=held.memories_bytes, placements=tuple(placements))


def _inside(region: Region, other: Region) -> bool:
    return intersection(region, other) == canonical(region)


def _by_tensor(source: Layout) -> dict[str, list[Placement]]:
    """Of each tensor the placements with a region of their own, in the layout's order."""
    specs = source.specs()
    regions: dict[str, dict[Region, Placement]] = defaultdict(dict)
    for placement in source.placements:
        if count(placement.region):
            regions[specs[placement.name].name].setdefault(canonical(placement.region), placement)
    found: dict[str, list[Placement]] = defaultdict(list)
    found.update({name: list(placements.values()) for name, placements in regions.items()})
    return found


def _offered(names: Mapping[str, TensorSpec], wanted: TensorSpec) -> TensorSpec:
    offered = next((names[name] for name in wanted.names if name in names), None)
    if offered is None:
        raise ManifestMismatch([f"{wanted.name} missing"])
    if (offered.dtype, offered.shape) != (wanted.dtype, wanted.shape):
        raise ManifestMismatch([f"{wanted.name} expected {wanted.describe()}, offered {offered.describe()}"])
    return offered


def _parcels(
    build: _Build, held: list[Placement], target: Placement, spec: TensorSpec
) -> Iterator[Placement]:
    """The parcels that fill one placement; those of a region that was asked for before are the same."""
    filled, wanted = 0, count(target.region)
    for placement in held if wanted else ():
        shared = intersection(placement.region, target.region)
        if shared is not None:
            filled += count(shared)
            yield from build.placed(spec, shared)
    if filled != wanted:
        problem = "does not offer all of" if filled < wanted else "offers more than once parts of"
        raise LayoutInvalid(f"{spec.name}: the source {problem} {show(target.region)}")


@dataclass(slots=True)
class _Build:
    """Buckets in the making."""

    bucket_bytes: int
    sizes_bytes: list[int] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    _known: dict[tuple[str, Region], list[Placement]] = field(default_factory=dict)

    def placed(self, spec: TensorSpec, region: Region) -> list[Placement]:
        """The parcels of a region, cut where a bucket ends."""
        key = (spec.name, region)
        if key not in self._known:
            self._known[key] = list(self._cut(spec, region))
        return self._known[key]

    def _cut(self, spec: TensorSpec, region: Region) -> Iterator[Placement]:
        left, item = [region], spec.dtype.size_bytes
        while left:
            part = left.pop()
            start, space = self._space()
            size = count(part) * item
            if size <= space:
                yield self._place(spec, part, start, size)
                continue
            axis = next(axis for axis, span in enumerate(part) if span.count > 1)
            inside = size // part[axis].count
            fitting = space // inside
            if fitting == 0 and start and inside <= self.bucket_bytes:
                self.sizes_bytes.append(0)  # the next bucket holds at least one line of it
                left.append(part)
            else:
                head, rest = _split(part, axis, max(1, fitting))
                left += [rest, head]

    def _space(self) -> tuple[int, int]:
        """Where the next parcel begins in the last bucket, and how much fits there."""
        if not self.sizes_bytes or align(self.sizes_bytes[-1], ALIGNMENT_BYTES) >= self.bucket_bytes:
            self.sizes_bytes.append(0)
        start = align(self.sizes_bytes[-1], ALIGNMENT_BYTES)
        return start, self.bucket_bytes - start

    def _place(self, spec: TensorSpec, region: Region, start: int, size: int) -> Placement:
        shape = counts(region)
        strides, stride = [], spec.dtype.size_bytes
        for extent in reversed(shape):
            strides.append(stride)
            stride *= extent
        parcel = Placement(
            name=spec.name,
            region=region,
            memory=len(self.sizes_bytes) - 1,
            offset_bytes=start,
            strides_bytes=tuple(reversed(strides)),
        )
        self.sizes_bytes[-1] = start + size
        self.placements.append(parcel)
        return parcel


def _split(region: Region, axis: int, first: int) -> tuple[Region, Region]:
    """So many positions of one dimension, and the others."""
    span = region[axis]
    head = Span(span.start, first, span.step)
    rest = Span(span.start + first * span.step, span.count - first, span.step)
    return (
        canonical((*region[:axis], head, *region[axis + 1 :])),
        canonical((*region[:axis], rest, *region[axis + 1 :])),
    )
