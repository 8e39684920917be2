"""Declarations: what a parameter holds of which full tensors, declared once, by the module that creates it.

The parameter's shape, what start-up loading reads and what a live update writes all follow from it. A declaration belongs to its module
and is found by the parameter's name there: whatever becomes of the tensor object or of its storage, it stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from liveweight.engine.models.forward import Group
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.errors import EngineConfigInvalid
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Span, count, whole

Bounds = tuple[int, int]
"""Start and stop along one dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The full tensors that a parameter is cut from, over all ranks, and the pieces that it holds here.

    `least` is the least shape: what no piece covers is padding, zero, and stays so.
    """

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    least: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape: what its pieces take, and no less than `least`."""
        shape = list(self.least)
        for piece in self.pieces:
            at, first = piece.at or (0,) * len(shape), len(shape) - len(piece.region)
            for axis, index in enumerate(at):
                extent = piece.region[axis - first].count if axis >= first else 1
                shape[axis] = max(shape[axis], index + extent)
        return tuple(shape)

    @property
    def padded(self) -> bool:
        """Whether there is padding."""
        return sum(count(piece.region) for piece in self.pieces) != torch.Size(self.shape).numel()


class Declared(nn.Module):
    """A module whose parameters are declared."""

    def __init__(self) -> None:
        super().__init__()
        self._declarations: dict[str, Declaration] = {}

    def declare(self, name: str, declaration: Declaration, device: str) -> None:
        """Create the parameter that the declaration describes: without content, padding zero."""
        make = torch.zeros if declaration.padded else torch.empty
        dtype = getattr(torch, declaration.tensors[0].dtype.value)
        tensor = make(declaration.shape, dtype=dtype, device=device)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._declarations[name] = declaration

    @property
    def declarations(self) -> Iterator[tuple[str, Declaration]]:
        """What each parameter of this module holds, by its name here."""
        return iter(self._declarations.items())


def declarations(module: nn.Module) -> dict[str, Declaration]:
    """What every parameter below a module holds, by its full name."""
    return {
        f"{prefix}.{name}" if prefix else name: declaration
        for prefix, part in module.named_modules()
        if isinstance(part, Declared)
        for name, declaration in part.declarations
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a model is built: its spec, the group it is cut for, the engine's dtype and device."""

    spec: ModelSpec
    group: Group
    dtype: DType
    device: str

    def tensor(self, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> TensorSpec:
        """A full tensor of the checkpoint, in the engine's dtype."""
        return TensorSpec(name=name, dtype=self.dtype, shape=shape, aliases=aliases)

    def share(self, total: int, what: str) -> Bounds:
        """This rank's equal share; EngineConfigInvalid where ranks do not divide it."""
        if total % self.group.size:
            raise EngineConfigInvalid(f"tp {self.group.size} does not divide {what} of the model, {total}")
        each = total // self.group.size
        return self.group.rank * each, (self.group.rank + 1) * each

    def uneven(self, total: int) -> Bounds:
        """This rank's share where ranks need not divide it: the first ones have one more."""
        each, more = divmod(total, self.group.size)
        start = self.group.rank * each + min(self.group.rank, more)
        return start, start + each + (self.group.rank < more)


def everything(*tensors: TensorSpec) -> Declaration:
    """One whole tensor; or several vectors, one per row."""
    if len(tensors) == 1:
        return Declaration(
            tensors=tensors,
            pieces=(Piece(tensor=tensors[0], region=whole(tensors[0].shape)),),
            least=tensors[0].shape,
        )
    pieces = tuple(Piece(tensor=t, region=whole(t.shape), at=(row, 0)) for row, t in enumerate(tensors))
    return Declaration(tensors=tensors, pieces=pieces, least=(0, 0))


def rows(parts: Sequence[tuple[TensorSpec, Bounds]], *, least: int = 0) -> Declaration:
    """Rows of several tensors (of the first dimension), one run after the other; padded to `least` rows."""
    pieces, at = [], 0
    for tensor, (start, stop) in parts:
        inner = tensor.shape[1:]
        if stop > start:
            region = (Span(start, stop - start), *whole(inner))
            pieces.append(Piece(tensor=tensor, region=region, at=(at, *(0 for _ in inner))))
        at += stop - start
    tensors = tuple(tensor for tensor, _ in parts)
    return Declaration(tensors=tensors, pieces=tuple(pieces), least=(max(at, least), *tensors[0].shape[1:]))


def columns(tensor: TensorSpec, bounds: Bounds) -> Declaration:
    """Columns of a matrix."""
    start, stop = bounds
    region = (Span(0, tensor.shape[0]), Span(start, stop - start))
    return Declaration(tensors=(tensor,), pieces=(Piece(tensor=tensor, region=region),), least=(0, 0))


def stacked(groups: Iterable[Sequence[TensorSpec]], bounds: Bounds, *, least: tuple[int, ...]) -> Declaration:
    """Groups of whole matrices, each group's one below the other, stacked along a new first dimension; this rank has `bounds` of them."""
    tensors: list[TensorSpec] = []
    pieces: list[Piece] = []
    start, stop = bounds
    for number, group in enumerate(groups):
        tensors += group
        if not start <= number < stop:
            continue
        row = 0
        for tensor in group:
            pieces.append(Piece(tensor=tensor, region=whole(tensor.shape), at=(number - start, row, 0)))
            row += tensor.shape[0]
    return Declaration(tensors=tuple(tensors), pieces=tuple(pieces), least=least)
