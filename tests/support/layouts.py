"""Random tensors, regions and layouts for property tests, and the plain slicing that they are compared with."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, Span, canonical, count, counts

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """A full tensor: its spec and its elements as raw bytes, one more axis than the shape."""

    spec: TensorSpec
    raw: Bytes

    def part(self, region: Region) -> Bytes:
        """The elements of a region, by plain slicing."""
        index = tuple(slice(s.start, s.start + s.count * s.step, s.step) for s in region)
        return self.raw[index]


def view(memory: Bytes, placement: Placement, size_bytes: int) -> Bytes:
    """The elements of a placement in its memory, as raw bytes with one more axis; no copy."""
    return np.ndarray(
        (*counts(placement.region), size_bytes),
        np.uint8,
        memory.data,
        placement.offset_bytes,
        (*placement.strides_bytes, 1),
    )


@st.composite
def fulls(draw: st.DrawFn, name: str = "w", max_side: int = 7) -> Full:
    """One tensor of any dtype, zero to four dimensions, random content."""
    shape = tuple(draw(st.lists(st.integers(0, max_side), max_size=4)))
    dtype = draw(st.sampled_from(list(DType)))
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Full(spec=spec, raw=rng.integers(0, 256, (*shape, dtype.size_bytes), dtype=np.uint8))


@st.composite
def spans(draw: st.DrawFn, size: int) -> Span:
    """Some positions of a dimension, in steps."""
    if size == 0:
        return Span(0, 0)
    step = draw(st.integers(1, 3))
    start = draw(st.integers(0, size - 1))
    most = (size - 1 - start) // step + 1
    return Span(start, draw(st.integers(0, most)), step).canonical()


def regions(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    """Any box of a tensor."""
    return st.tuples(*(spans(size) for size in shape)).map(canonical)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Disjoint boxes that cover a tensor: each dimension cut at random places, or dealt out in turns."""
    axes = []
    for size in shape:
        if size > 1 and draw(st.booleans()):
            turns = draw(st.integers(1, min(3, size)))
            axes.append([Span(i, len(range(i, size, turns)), turns).canonical() for i in range(turns)])
        else:
            cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2))) if size > 1 else []
            ends = [0, *cuts, size]
            axes.append([Span(a, b - a).canonical() for a, b in itertools.pairwise(ends)])
    return [canonical(tile) for tile in itertools.product(*axes)]


@st.composite
def placed(draw: st.DrawFn, items: list[tuple[TensorSpec, Region]]) -> Layout:
    """The regions in one to three memories: dimensions stored in any order, gaps between elements, lines and placements."""
    ends = [draw(st.integers(0, 5)) for _ in range(draw(st.integers(1, 3)))]
    placements = []
    for spec, region in items:
        memory = draw(st.integers(0, len(ends) - 1))
        order = draw(st.permutations(range(len(region))))
        strides, size = [0] * len(region), spec.dtype.size_bytes
        for axis in reversed(order):
            strides[axis] = size
            size = size * max(1, region[axis].count) + draw(st.integers(0, 1)) * draw(st.integers(0, 9))
        placements.append(
            Placement(
                name=spec.name,
                region=canonical(region),
                memory=memory,
                offset_bytes=ends[memory],
                strides_bytes=tuple(strides),
            )
        )
        ends[memory] += (size if count(region) else 0) + draw(st.integers(0, 3))
    tensors = {spec.name: spec for spec, _ in items}
    return Layout(tensors=tuple(tensors.values()), memories_bytes=tuple(ends), placements=tuple(placements))


def filled(layout: Layout, tensors: dict[str, Full]) -> list[Bytes]:
    """Memories that hold the tensors as the layout says; padding is random."""
    rng = np.random.default_rng(1)
    memories = [rng.integers(0, 256, size, dtype=np.uint8) for size in layout.memories_bytes]
    for placement in layout.placements:
        full = tensors[placement.name]
        if math.prod(counts(placement.region)):
            view(memories[placement.memory], placement, full.spec.dtype.size_bytes)[...] = full.part(
                placement.region
            )
    return memories
