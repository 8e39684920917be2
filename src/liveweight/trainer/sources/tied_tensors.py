"""Unique tensors: the tensors of one process under clean names, with tied tensors once.

Used for modules and for state dicts. Compares names and storage, never bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from liveweight.errors import ManifestInvalid
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.tensor_names import clean_all
from liveweight.trainer.sources.tensors import AnyTensor, StorageKey, spec_of, storage_key

T = TypeVar("T", bound=AnyTensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Entry `alias` of a list of tensors is the same tensor as its entry `owner`."""

    alias: int
    owner: int
    name: str
    owner_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueTensors:
    """A manifest and its names, the entries of the list that it was made of which own a tensor, and those which only share one."""

    manifest: Manifest
    names: tuple[str, ...]
    owners: tuple[int, ...]
    ties: tuple[Tie, ...]

    def walk(self, tensors: Sequence[T]) -> Iterator[tuple[str, T]]:
        """One pass over a new list of the same entries; ManifestInvalid where tied tensors have come apart."""
        for tie in self.ties:
            alias, owner = tensors[tie.alias], tensors[tie.owner]
            if alias is not owner and storage_key(alias) != storage_key(owner):
                raise ManifestInvalid(
                    f"{tie.name} was tied to {tie.owner_name}, and is a tensor of its own now"
                )
        owned = [tensors[number] for number in self.owners] if self.ties else tensors
        return zip(self.names, owned, strict=True)


def find_unique_tensors(names: Sequence[str], tensors: Sequence[AnyTensor]) -> UniqueTensors:
    """Wrappers stripped from the names. Of tensors that lie in the same place in the same way, the first one's name counts."""
    specs: list[TensorSpec] = []
    owners: list[int] = []
    aliases: list[list[str]] = []
    ties: list[Tie] = []
    first: dict[StorageKey, int] = {}
    for number, (name, tensor) in enumerate(zip(clean_all(names), tensors, strict=True)):
        spec = spec_of(name, tensor)
        known = first.setdefault(storage_key(tensor), len(specs))
        if known == len(specs):
            specs.append(spec)
            owners.append(number)
            aliases.append([])
        else:
            aliases[known].append(name)
            ties.append(Tie(alias=number, owner=owners[known], name=name, owner_name=specs[known].name))
    whole = (
        msgspec.structs.replace(spec, aliases=tuple(also)) if also else spec
        for spec, also in zip(specs, aliases, strict=True)
    )
    manifest = Manifest(tensors=tuple(whole))
    own = tuple(spec.name for spec in manifest)
    return UniqueTensors(manifest=manifest, names=own, owners=tuple(owners), ties=tuple(ties))
