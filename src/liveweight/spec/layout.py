"""Layouts: where the regions of tensors lie in a set of memories.

A layout describes a source's arenas or a rank's parameters alike. Fused tensors are several placements in one memory, transposed
storage is a placement with its strides swapped, padding is what no placement covers. Moving bytes between layouts is plan/'s.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import xxhash

from liveweight.errors import LayoutInvalid
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import Region, Span, canonical, check_inside, count, counts, whole

ALIGNMENT_BYTES = 64


class Placement(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A region of tensor `name` in memory number `memory`: its first element at an offset, one stride per dimension of the tensor."""

    name: str
    region: Region
    memory: int
    offset_bytes: int
    strides_bytes: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Tensors, the sizes of the memories that hold them, and the placements. Checked when built: everything is inside."""

    tensors: tuple[TensorSpec, ...]
    memories_bytes: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        specs = self.specs()
        for placement in self.placements:
            spec = specs.get(placement.name)
            if spec is None:
                raise LayoutInvalid(f"{placement.name}: placed, but not among the layout's tensors")
            _check(placement, spec, self.memories_bytes)

    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors by every name they have."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}

    @property
    def placed_bytes(self) -> int:
        """Bytes of all placements: what it takes to fill the layout."""
        specs = self.specs()
        return sum(count(p.region) * specs[p.name].dtype.size_bytes for p in self.placements)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for layouts that place the same regions at the same bytes. Content does not matter."""
        bare = [(t.name, t.dtype.value, t.shape, t.aliases) for t in self.tensors]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((bare, self.memories_bytes, self.placements)))

    def manifest(self) -> Manifest:
        """The tensors as a manifest, in the layout's order."""
        return Manifest(tensors=self.tensors)

    def without(self, names: Iterable[str]) -> Layout:
        """The same memories, with these tensors and their placements left out. A placement may name its tensor by an alias."""
        gone = {
            name
            for tensor in self.tensors
            if not set(names).isdisjoint(tensor.names)
            for name in tensor.names
        }
        return Layout(
            tensors=tuple(tensor for tensor in self.tensors if tensor.name not in gone),
            memories_bytes=self.memories_bytes,
            placements=tuple(placement for placement in self.placements if placement.name not in gone),
        )


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a parameter holds of one tensor: the region, the index in the parameter where it begins, and which of the parameter's
    dimensions each of the tensor's runs along (`axes`; left out: the last ones, in order)."""

    tensor: TensorSpec
    region: Region
    at: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()


def place(
    pieces: Iterable[Piece], *, memory: int, shape: Sequence[int], offset_bytes: int = 0
) -> list[Placement]:
    """Placements of the pieces of one contiguous, row-major parameter of that shape."""
    placements = []
    for piece in pieces:
        strides = contiguous_strides(shape, piece.tensor.dtype)
        rank = len(piece.tensor.shape)
        axes = piece.axes or tuple(range(len(shape) - rank, len(shape)))
        at = piece.at or (0,) * len(shape)
        _check_fit(piece, axes, at, shape)
        start = sum(index * stride for index, stride in zip(at, strides, strict=True))
        placements.append(
            Placement(
                name=piece.tensor.name,
                region=canonical(piece.region),
                memory=memory,
                offset_bytes=offset_bytes + start,
                strides_bytes=tuple(strides[axis] for axis in axes),
            )
        )
    return placements


def packed(tensors: Sequence[TensorSpec], *, alignment_bytes: int = ALIGNMENT_BYTES) -> Layout:
    """Whole tensors one after the other in a single memory: the layout of a frozen arena."""
    return packed_regions([(t, whole(t.shape)) for t in tensors], alignment_bytes=alignment_bytes)


def packed_regions(
    parts: Sequence[tuple[TensorSpec, Region]], *, alignment_bytes: int = ALIGNMENT_BYTES
) -> Layout:
    """Parts of tensors, each contiguous, one after the other in a single memory: the arena of a rank that has only those."""
    sizes = (align(count(region) * spec.dtype.size_bytes, alignment_bytes) for spec, region in parts)
    ends = list(itertools.accumulate(sizes, initial=0))
    placements = tuple(
        Placement(
            name=spec.name,
            region=region,
            memory=0,
            offset_bytes=offset,
            strides_bytes=contiguous_strides(counts(region), spec.dtype),
        )
        for (spec, region), offset in zip(parts, ends, strict=False)
    )
    tensors = tuple({spec.name: spec for spec, _ in parts}.values())
    return Layout(tensors=tensors, memories_bytes=(ends[-1],), placements=placements)


def contiguous_strides(shape: Sequence[int], dtype: DType) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    return tuple(math.prod(shape[axis + 1 :]) * dtype.size_bytes for axis in range(len(shape)))


def align(size_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def _check(placement: Placement, spec: TensorSpec, memories_bytes: Sequence[int]) -> None:
    check_inside(placement.name, placement.region, spec.shape)
    if len(placement.strides_bytes) != len(spec.shape):
        raise LayoutInvalid(
            f"{placement.name}: {len(placement.strides_bytes)} strides for {len(spec.shape)} dimensions"
        )
    if not 0 <= placement.memory < len(memories_bytes):
        raise LayoutInvalid(f"{placement.name}: memory {placement.memory} of {len(memories_bytes)}")
    if count(placement.region) == 0:
        return
    if placement.offset_bytes < 0 or any(stride < 0 for stride in placement.strides_bytes):
        raise LayoutInvalid(f"{placement.name}: negative offset or stride")
    steps = (
        (s.count - 1) * stride for s, stride in zip(placement.region, placement.strides_bytes, strict=True)
    )
    end = placement.offset_bytes + sum(steps) + spec.dtype.size_bytes
    if end > memories_bytes[placement.memory]:
        raise LayoutInvalid(
            f"{placement.name}: ends at byte {end} of a memory of {memories_bytes[placement.memory]}"
        )


def _check_fit(piece: Piece, axes: tuple[int, ...], at: tuple[int, ...], shape: Sequence[int]) -> None:
    name = piece.tensor.name
    check_inside(name, piece.region, piece.tensor.shape)
    if len(at) != len(shape) or len(axes) != len(piece.tensor.shape) or len(set(axes)) != len(axes):
        raise LayoutInvalid(
            f"{name}: index {at} or axes {axes} do not fit a parameter of shape {tuple(shape)}"
        )
    extents: dict[int, Span] = dict(zip(axes, piece.region, strict=True))
    for axis, (index, size) in enumerate(zip(at, shape, strict=True)):
        extent = extents[axis].count if axis in extents else 1
        if count(piece.region) and not 0 <= index <= size - extent:
            raise LayoutInvalid(
                f"{name}: does not fit into dimension {axis} of a parameter of shape {tuple(shape)}"
            )
