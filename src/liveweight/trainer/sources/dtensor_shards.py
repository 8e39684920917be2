"""What one rank of a trainer holds of a model: parts of full tensors, as its DTensors say, frozen where it is.

Owns the bookkeeping from names and placements to parts; no tensor is gathered, and none is kept. Plain tensors are copies that every rank
has. ShardedOffers (offers/sharded) puts the parts of all ranks together.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from liveweight.errors import ManifestInvalid
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import Region, Span, canonical, counts, intersection, show, whole
from liveweight.spec.tensor_names import clean_all
from liveweight.trainer.offers.freeze import Part, offered_manifest
from liveweight.trainer.sources.dtensor_placements import Index, cuts_of, held, local_of
from liveweight.trainer.sources.module_walker import ModuleWalker
from liveweight.trainer.sources.renamed_source import data_parallel_names, renamed
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.stacked_experts import Splits, SplitSource, split_manifest, splits_for
from liveweight.trainer.sources.tensors import StorageKey, is_distributed, spec_of, storage_key

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What a rank will freeze: a source of local tensors, what they are, how they are offered, and which parts of what that is."""

    source: Source
    own: Manifest
    offered: Manifest
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part of a full tensor, and the view of the rank's local tensor (entry `number`) that it is. `index` None: all of it;
    `flat`: without its first dimension, which is one expert."""

    number: int
    spec: TensorSpec
    region: Region
    index: Index | None
    flat: bool = False

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The part, of the local tensor as it is now."""
        part = local if self.index is None else local[self.index]
        return part[0] if self.flat else part

    @property
    def name(self) -> str:
        """What errors call it."""
        return (
            self.spec.name
            if self.region == whole(self.spec.shape)
            else f"{self.spec.name}{show(self.region)}"
        )

    def local_spec(self) -> TensorSpec:
        """The part as a tensor of its own."""
        return TensorSpec(name=self.name, dtype=self.spec.dtype, shape=counts(self.region))


class Shards:
    """A module's or a mapping's tensors, as far as this rank holds them. Walked once; the tensors themselves are looked up anew."""

    def __init__(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._module_walker = None if isinstance(model, Mapping) else _module_walker(model)
        self._names = (
            list(model) if isinstance(model, Mapping) else (self._module_walker or ModuleWalker()).names
        )
        self._placed: list[tuple[object, ...]] = []
        self._ties: list[tuple[int, int]] = []
        self._pieces = self._walk(self._tensors())

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The full tensors of which this rank has a part, or an empty one."""
        return _specs(self._pieces)

    def gradients(self) -> dict[str, bool]:
        """For every parameter, whether it requires a gradient."""
        import torch

        named = zip(clean_all(self._names), self._tensors(), strict=True)
        return {name: t.requires_grad for name, t in named if isinstance(t, torch.nn.Parameter)}

    def specs_for(self, expected: Manifest) -> tuple[TensorSpec, ...]:
        """`specs`, under the names that engines expect."""
        return _specs(self._pieces_for(expected))

    def cut(
        self, expected: Manifest, names: frozenset[str] = frozenset(), *, without: bool = True
    ) -> ShardPlan | None:
        """What to freeze for engines that expect that, without the tensors of these names; or, if not `without`, of these alone. None
        where this rank holds nothing of it."""
        held_pieces = [
            piece for piece in self._pieces_for(expected) if names.isdisjoint(piece.spec.names) == without
        ]
        if not held_pieces:
            return None
        specs = Manifest(tensors=_specs(held_pieces))
        splits = splits_for(specs, expected)
        pieces = [part for piece in held_pieces for part in _split(piece, splits)]
        split = split_manifest(specs, splits)
        full = {own.name: spec for own, spec in zip(split, offered_manifest(split, expected), strict=True)}
        own = Manifest(tensors=tuple(piece.local_spec() for piece in pieces))
        offered = Manifest(
            tensors=tuple(
                msgspec.structs.replace(spec, dtype=full[piece.spec.name].dtype)
                for spec, piece in zip(own, pieces, strict=True)
            )
        )
        parts = tuple((full[piece.spec.name], piece.region) for piece in pieces)
        return ShardPlan(source=_LocalSource(self, pieces, own), own=own, offered=offered, parts=parts)

    def _pieces_for(self, expected: Manifest) -> list[_Piece]:
        """The pieces under the names that engines expect: those of a mapping without DDP's `module.`, if a wrapper put it there."""
        if self._module_walker is not None:
            return self._pieces
        own = Manifest(tensors=self.specs)
        specs = renamed(own, data_parallel_names(own, expected))
        new = {before.name: after for before, after in zip(own, specs, strict=True)}
        return [dataclasses.replace(piece, spec=new[piece.spec.name]) for piece in self._pieces]

    def locals(self) -> list[torch.Tensor]:
        """What lies here now, one tensor per name; ManifestInvalid where a tensor is placed or tied otherwise than it was."""
        tensors = self._tensors()
        for name, tensor, before in zip(self._names, tensors, self._placed, strict=True):
            if _placing(tensor) != before:
                raise ManifestInvalid(f"{name} is placed otherwise than when its manifest was made")
        local = [local_of(tensor) for tensor in tensors]
        for alias, owner in self._ties:
            if tensors[alias] is not tensors[owner] and storage_key(local[alias]) != storage_key(
                local[owner]
            ):
                raise ManifestInvalid(
                    f"{self._names[alias]} was tied to {self._names[owner]}, and is a tensor of its own now"
                )
        return local

    def _tensors(self) -> list[torch.Tensor]:
        if self._module_walker is not None:
            _reshard(self._model)
            return self._module_walker.tensors()
        model: Any = self._model
        differing = sorted(set(self._names) ^ set(model))
        if differing:
            raise ManifestInvalid(f"the mapping's names changed after its manifest was made: {differing[0]}")
        return [model[name] for name in self._names]

    def _walk(self, tensors: Sequence[torch.Tensor]) -> list[_Piece]:
        """Of tensors that are one, the first one's name counts: the same object, or the same place."""
        owners: dict[object, int] = {}
        aliases: dict[int, list[str]] = {}
        found: list[_Piece] = []
        for number, (name, tensor) in enumerate(zip(clean_all(self._names), tensors, strict=True)):
            self._placed.append(_placing(tensor))
            keys = _identities(tensor)
            owner = next((owners[key] for key in keys if key in owners), number)
            owners.update((key, owner) for key in keys)
            if owner != number:
                aliases.setdefault(owner, []).append(name)
                self._ties.append((number, owner))
            else:
                found += _pieces(number, name, tensor)
        return [_aliased(piece, aliases.get(piece.number, ())) for piece in found]


def _specs(pieces: Sequence[_Piece]) -> tuple[TensorSpec, ...]:
    return tuple({piece.spec.name: piece.spec for piece in pieces}.values())


class _LocalSource:
    """The local tensors of a rank, part by part."""

    held = True

    def __init__(self, shards: Shards, pieces: Sequence[_Piece], own: Manifest) -> None:
        self._shards, self._pieces, self._own = shards, pieces, own
        self._names = [spec.name for spec in own]

    def manifest(self) -> Manifest:
        """The parts as tensors of their own."""
        return self._own

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What lies here now."""
        local = self._shards.locals()
        for name, piece in zip(self._names, self._pieces, strict=True):
            yield name, piece.view(local[piece.number])


def cut_whole(source: Source, expected: Manifest) -> ShardPlan:
    """All of a source that gives whole tensors, under the names that engines expect."""
    splits = splits_for(source.manifest(), expected)
    source = SplitSource(source, splits) if splits else source
    own = source.manifest()
    offered = offered_manifest(own, expected)
    return ShardPlan(
        source=source, own=own, offered=offered, parts=tuple((spec, whole(spec.shape)) for spec in offered)
    )


def _module_walker(module: torch.nn.Module) -> ModuleWalker:
    _reshard(module)
    return ModuleWalker.of(module)


def _reshard(module: Any) -> None:
    """FSDP2 leaves some modules gathered after a forward pass without a backward one; their shards are what we publish."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", ())
    for part in module.modules() if fsdp is not None else ():
        if isinstance(part, kind):
            part.reshard()


def _placing(tensor: Any) -> tuple[object, ...]:
    """How a tensor is placed: equal as long as its parts are the same."""
    return (tuple(tensor.placements), tensor.device_mesh, tensor.shape) if is_distributed(tensor) else ()


def _identities(tensor: torch.Tensor) -> list[object]:
    """By what a tensor is known again: itself, and, if a part of it lies here, where that is."""
    local = local_of(tensor)
    place: StorageKey = storage_key(local)
    return (
        [("object", id(tensor)), (*place, tuple(tensor.shape))] if local.numel() else [("object", id(tensor))]
    )


def _pieces(number: int, name: str, tensor: Any) -> list[_Piece]:
    local = local_of(tensor)
    spec = spec_of(name, local)
    if not is_distributed(tensor):
        return [_Piece(number=number, spec=spec, region=whole(spec.shape), index=None)]
    spec = msgspec.structs.replace(spec, shape=tuple(tensor.shape))
    cuts = cuts_of(name, tensor)
    if cuts is None:
        return []
    parts = held(spec.shape, cuts)
    shape = tuple(max(index[axis].stop for _, index in parts) for axis in range(len(spec.shape)))
    if shape != tuple(local.shape):
        raise ManifestInvalid(
            f"{name}: its placements {tuple(tensor.placements)} leave {list(shape)} of {list(spec.shape)} to this rank, "
            f"which holds {list(local.shape)}"
        )
    if len(parts) == 1:
        return [_Piece(number=number, spec=spec, region=parts[0][0], index=None)]
    return [_Piece(number=number, spec=spec, region=region, index=index) for region, index in parts]


def _aliased(piece: _Piece, aliases: Sequence[str]) -> _Piece:
    if not aliases:
        return piece
    spec = msgspec.structs.replace(piece.spec, aliases=tuple(aliases))
    return dataclasses.replace(piece, spec=spec)


def _split(piece: _Piece, splits: Splits) -> list[_Piece]:
    """The parts of a stack of experts that lie in a piece of it; any other piece itself."""
    parts = splits.get(piece.spec.name)
    if parts is None:
        return [piece]
    rows = parts[0].shape[0]
    kinds = piece.spec.shape[1] // rows
    found = []
    for number, part in enumerate(parts):
        expert, first = number // kinds, number % kinds * rows
        box = (Span(expert, 1), Span(first, rows), Span(0, part.shape[1]))
        shared = intersection(piece.region, box)
        if shared is None:
            continue
        inside = tuple(_within(own, span) for own, span in zip(piece.region, shared, strict=True))
        if piece.index is not None:
            inside = tuple(_after(outer, inner) for outer, inner in zip(piece.index, inside, strict=True))
        region = canonical([Span(shared[1].start - first, shared[1].count), shared[2]])
        found.append(_Piece(number=piece.number, spec=part, region=region, index=inside, flat=True))
    return found


def _within(own: Span, span: Span) -> slice:
    start = own.index_of(span.start)
    return slice(start, start + span.count)


def _after(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
