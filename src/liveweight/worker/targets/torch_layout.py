"""The layout of a set of torch tensors: which of them are tied, how their storage is ordered, which regions they hold.

Owns the checks that a set of tensors can be a target, and the layout that follows from them. Their memory and the swap are
torch_target's. Nothing here reads or writes a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from liveweight.devices.device import CPU, Device
from liveweight.errors import LayoutInvalid
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, Placement, contiguous_strides, place
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, Span, count, intersection, show, whole

if TYPE_CHECKING:
    import torch

Parameters: TypeAlias = "Mapping[str, torch.Tensor | tuple[torch.Tensor, Sequence[Piece]]]"
"""By name: a tensor that is a whole one of the manifest, or a tensor and the pieces it holds; no pieces, no part in rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One memory of a target: the names and tensor objects that share it, and the regions it holds (None: itself, whole)."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    dtype: DType
    size_bytes: int
    pieces: tuple[Piece, ...] | None

    @property
    def tensor(self) -> torch.Tensor:
        """One of its objects; all have the same memory, dtype, shape and strides."""
        return self.tensors[0]

    @property
    def padded(self) -> bool:
        """Whether it has elements that no piece covers: padding, which only the live memory knows."""
        return self.pieces is not None and sum(count(p.region) for p in self.pieces) != self.tensor.numel()


def device_of(parameters: Parameters) -> str:
    """The one device that the tensors which take part are on; the host where there are none. LayoutInvalid, with names, for several."""
    homes: dict[torch.device, str] = {}
    for name, tensor, _ in _taking_part(parameters):
        homes.setdefault(tensor.device, name)
    if len(homes) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise LayoutInvalid(f"tensors on several devices: {where}")
    for device, name in homes.items():
        if device.type not in ("cpu", "cuda"):
            raise LayoutInvalid(f"{name}: on {device}, which is neither host memory nor a CUDA device")
        return str(device)
    return "cpu"


def gather(parameters: Parameters, device: Device = CPU) -> tuple[Parameter, ...]:
    """The tensors that take part, tied ones as one parameter. LayoutInvalid for what cannot be a target there, with its name."""
    groups: dict[object, list[tuple[str, torch.Tensor, tuple[Piece, ...] | None]]] = {}
    home = device.torch_device
    for name, tensor, pieces in _taking_part(parameters):
        if tensor.device != home:
            raise LayoutInvalid(f"{name}: on {tensor.device}, but the target's device is {device.name}")
        _check_tensor(name, tensor)
        groups.setdefault(_identity(tensor), []).append((name, tensor, pieces))
    gathered = tuple(map(_tied, groups.values()))
    _check_apart(gathered)
    return gathered


def layout_of(parameters: Sequence[Parameter]) -> Layout:
    """Memory i is parameter i. LayoutInvalid for pieces of another dtype, outside, or on top of each other."""
    specs: dict[str, TensorSpec] = {}
    placements: list[Placement] = []
    for memory, parameter in enumerate(parameters):
        pieces = _pieces(parameter)
        for piece in pieces:
            spec = msgspec.structs.replace(piece.tensor, digest=None)
            if specs.setdefault(spec.name, spec) != spec:
                raise LayoutInvalid(f"{spec.name}: pieces of it disagree about its dtype, shape or aliases")
        order = _storage_order(parameter.tensor)
        shape = tuple(parameter.tensor.shape)
        placements += place(
            (_stored(piece, order, len(shape)) for piece in pieces),
            memory=memory,
            shape=[shape[axis] for axis in order],
        )
        if len(pieces) > 1:
            _check_disjoint(parameter.names[0], pieces, shape)
    return Layout(
        tensors=tuple(specs.values()),
        memories_bytes=tuple(parameter.size_bytes for parameter in parameters),
        placements=tuple(placements),
    )


def _taking_part(
    parameters: Parameters,
) -> Iterator[tuple[str, torch.Tensor, tuple[Piece, ...] | None]]:
    for name, given in parameters.items():
        tensor, pieces = (given[0], tuple(given[1])) if isinstance(given, tuple) else (given, None)
        if pieces != ():
            yield name, tensor, pieces


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout != torch.strided:
        raise LayoutInvalid(f"{name}: {tensor.layout}, not a strided tensor")
    dtype = _dtype(name, tensor)
    if tensor.numel() == 0:
        return
    if tensor.untyped_storage().data_ptr() == 0:
        raise LayoutInvalid(f"{name}: a {type(tensor).__name__} without memory of its own")
    if tensor.is_contiguous():
        return
    order, item = _storage_order(tensor), tensor.element_size()
    stored = contiguous_strides([tensor.shape[axis] for axis in order], dtype)
    lies = [(tensor.shape[axis], tensor.stride(axis) * item) for axis in order]
    if any(size > 1 and stride != dense for (size, stride), dense in zip(lies, stored, strict=True)):
        raise LayoutInvalid(
            f"{name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} overlaps itself or has gaps"
        )


def _dtype(name: str, tensor: torch.Tensor) -> DType:
    try:
        return DType(str(tensor.dtype).removeprefix("torch."))
    except ValueError:
        raise LayoutInvalid(f"{name}: {tensor.dtype} is not supported") from None


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same elements in the same order. Empty ones have no memory to share."""
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _tied(group: Sequence[tuple[str, torch.Tensor, tuple[Piece, ...] | None]]) -> Parameter:
    names = tuple(name for name, _, _ in group)
    declared = {pieces for _, _, pieces in group if pieces is not None}
    if len(declared) > 1:
        raise LayoutInvalid(
            f"{', '.join(names)}: one memory, declared in different ways; name aliases instead"
        )
    objects = {id(tensor): tensor for _, tensor, _ in group}
    tensor = group[0][1]
    return Parameter(
        names=names,
        tensors=tuple(objects.values()),
        dtype=_dtype(names[0], tensor),
        size_bytes=tensor.numel() * tensor.element_size(),
        pieces=next(iter(declared), None),
    )


def _check_apart(parameters: Iterable[Parameter]) -> None:
    """Refuse memory that two parameters share in part or in another shape: a swap would tear them apart."""
    spans = sorted((p.tensor.data_ptr(), p.size_bytes, p.names[0]) for p in parameters if p.size_bytes)
    for (start, size, name), (other, _, other_name) in itertools.pairwise(spans):
        if other < start + size:
            raise LayoutInvalid(f"{name} and {other_name} share memory without being the same tensor")


def _storage_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's dimensions from the outermost in memory to the innermost."""
    axes, strides = range(tensor.dim()), tensor.stride()
    return tuple(axes if tensor.is_contiguous() else sorted(axes, key=lambda axis: -strides[axis]))


def _pieces(parameter: Parameter) -> tuple[Piece, ...]:
    (name, *aliases), dtype = parameter.names, parameter.dtype
    if parameter.pieces is None:
        shape = tuple(parameter.tensor.shape)
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, aliases=tuple(aliases))
        return (Piece(tensor=spec, region=whole(shape)),)
    for piece in parameter.pieces:
        if piece.tensor.dtype is not dtype:
            raise LayoutInvalid(
                f"{piece.tensor.name}: {piece.tensor.dtype.value} in {name}, which is {dtype.value}"
            )
    return parameter.pieces


def _position(piece: Piece, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`at` and `axes` of a piece, spelled out."""
    axes = piece.axes or tuple(range(rank - len(piece.tensor.shape), rank))
    return piece.at or (0,) * rank, axes


def _stored(piece: Piece, order: Sequence[int], rank: int) -> Piece:
    """The piece in the dimensions of the storage, which is row-major where the tensor may not be."""
    at, axes = _position(piece, rank)
    if len(at) != rank or not set(axes) <= set(order):
        return piece  # does not fit: `place` says so
    return msgspec.structs.replace(
        piece, at=tuple(at[axis] for axis in order), axes=tuple(order.index(axis) for axis in axes)
    )


def _check_disjoint(name: str, pieces: Sequence[Piece], shape: Sequence[int]) -> None:
    """Refuse pieces that lie on top of each other in their parameter."""
    boxes = sorted(_boxes(pieces, len(shape)), key=lambda box: [span.start for span in box[1]])
    for number, (tensor, region) in enumerate(boxes):
        for other_tensor, other in boxes[number + 1 :]:
            if region and other[0].start > region[0].last:
                break  # sorted by their first dimension: no later one reaches back
            if intersection(region, other) is not None:
                raise LayoutInvalid(f"{name}: {tensor} and {other_tensor} both at {show(other)}")


def _boxes(pieces: Iterable[Piece], rank: int) -> Iterator[tuple[str, Region]]:
    """Where the pieces lie, in their parameter's coordinates."""
    for piece in pieces:
        if count(piece.region):
            at, axes = _position(piece, rank)
            extents = {axis: span.count for axis, span in zip(axes, piece.region, strict=True)}
            yield piece.tensor.name, tuple(Span(at[axis], extents.get(axis, 1)) for axis in range(rank))
