"""Regions: boxes in a full tensor's coordinates, and their intersections.

A region says what a rank or a source owns of a tensor. It knows nothing of memory: a layout says where its elements lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from liveweight.errors import LayoutInvalid


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`count` positions of one dimension: start, start + step, ... An empty span starts at 0 with step 1."""

    start: int
    count: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 0 or self.step < 1:
            raise ValueError(f"span start {self.start}, count {self.count}, step {self.step}")

    @property
    def last(self) -> int:
        """The last position; meaningless for an empty span."""
        return self.start + (self.count - 1) * self.step

    def canonical(self) -> Span:
        """Equal positions become equal spans: a lone position has step 1, nothing starts at 0."""
        if self.count == 0:
            return Span(0, 0)
        return Span(self.start, 1) if self.count == 1 else self

    def intersection(self, other: Span) -> Span:
        """The positions that both have: again a span, since the intersection of two arithmetic progressions is one."""
        if self.count == 0 or other.count == 0:
            return Span(0, 0)
        low, high = max(self.start, other.start), min(self.last, other.last)
        if self.step == other.step == 1:
            return Span(low, high - low + 1) if low <= high else Span(0, 0)
        step = math.lcm(self.step, other.step)
        first = _first_common(self, other, low)
        if first is None or first > high:
            return Span(0, 0)
        return Span(first, (high - first) // step + 1, step).canonical()

    def index_of(self, position: int) -> int:
        """How many positions of this span come before that one."""
        return (position - self.start) // self.step


def _first_common(a: Span, b: Span, low: int) -> int | None:
    """The smallest position >= low in both progressions, ends ignored."""
    divisor = math.gcd(a.step, b.step)
    if (b.start - a.start) % divisor:
        return None
    modulus = b.step // divisor
    turns = (
        (b.start - a.start) // divisor * pow(a.step // divisor, -1, modulus) % modulus if modulus > 1 else 0
    )
    common, step = a.start + turns * a.step, math.lcm(a.step, b.step)
    return common - (common - low) // step * step


Region = tuple[Span, ...]
"""A box: one span per dimension. A scalar's region is the empty tuple."""


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of a tensor."""
    return tuple(Span(0, size) for size in shape)


def box(*bounds: tuple[int, int] | slice) -> Region:
    """A region from (start, stop) pairs or slices with start and stop."""
    spans = []
    for bound in bounds:
        start, stop, step = (
            (bound.start, bound.stop, bound.step or 1) if isinstance(bound, slice) else (*bound, 1)
        )
        spans.append(Span(start, max(0, -(-(stop - start) // step)), step))
    return canonical(spans)


def canonical(region: Sequence[Span]) -> Region:
    """The one form that equal regions share."""
    return tuple(span.canonical() for span in region)


def count(region: Region) -> int:
    """How many elements a region has."""
    return math.prod(span.count for span in region)


def counts(region: Region) -> tuple[int, ...]:
    """The shape of a region's elements."""
    return tuple(span.count for span in region)


def intersection(a: Region, b: Region) -> Region | None:
    """The elements that both have; None where they share none."""
    both = tuple(x.intersection(y) for x, y in zip(a, b, strict=True))
    return None if count(both) == 0 else canonical(both)


def check_inside(name: str, region: Region, shape: Sequence[int]) -> None:
    """Refuse a region that is not inside its tensor."""
    if len(region) != len(shape):
        raise LayoutInvalid(f"{name}: a region of {len(region)} dimensions for a tensor of {len(shape)}")
    for axis, (span, size) in enumerate(zip(region, shape, strict=True)):
        if span.count and span.last >= size:
            raise LayoutInvalid(f"{name}: region reaches {span.last} in dimension {axis} of size {size}")


def check_tiling(name: str, regions: Sequence[Region], shape: Sequence[int]) -> None:
    """Refuse regions that overlap in part, or leave elements of the tensor to nobody. Equal ones are copies of each other."""
    distinct = sorted({canonical(region) for region in regions if count(region)}, key=_order)
    for position, region in enumerate(distinct):
        for other in distinct[position + 1 :]:
            if region and other[0].start > region[0].last:
                break  # sorted by their first dimension: no later one reaches back
            if intersection(region, other) is not None:
                raise LayoutInvalid(f"{name}: regions {show(region)} and {show(other)} overlap in part")
    covered, needed = sum(count(region) for region in distinct), math.prod(shape)
    if covered != needed:
        raise LayoutInvalid(f"{name}: {needed - covered} of {needed} elements belong to no region")


def _order(region: Region) -> list[tuple[int, int, int]]:
    return [(span.start, span.count, span.step) for span in region]


def show(region: Region) -> str:
    """A region as people write slices."""
    spans = (f"{s.start}:{s.start + s.count * s.step}" + (f":{s.step}" if s.step > 1 else "") for s in region)
    return f"[{', '.join(spans)}]"
