"""Renamed sources: a source whose names all have DDP's `module.` in front, under the names without it.

Used for sources that are only names and tensors. The module walker knows DDP by its type. What may be stripped is decided in
spec/tensor_names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from liveweight.spec.manifest import Manifest
from liveweight.spec.tensor_names import without_data_parallel
from liveweight.trainer.sources.in_memory import ModuleSource
from liveweight.trainer.sources.merged_adapters import MergedSource
from liveweight.trainer.sources.one_shot_source import OneShotSource
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.tensors import AnyTensor


class RenamedSource:
    """Another source's tensors under other names."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        """`names`: every name of the source, aliases included, to its new name."""
        self._source, self._names = source, names
        self.held = source.held

    def manifest(self) -> Manifest:
        """The source's manifest with the new names."""
        return renamed(self._source.manifest(), self._names)

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """One pass of the source. A name that the manifest did not list stays, and is refused by whoever reads the pass."""
        for name, tensor in self._source.tensors():
            yield self._names.get(name, name), tensor
            del tensor


def for_engines(source: Source, expected: Manifest | None) -> Source:
    """The source under the names that engines expect (None: no engine is known): without DDP's `module.`, if a wrapper put it there."""
    if isinstance(source, ModuleSource | MergedSource):
        return source
    if isinstance(source, OneShotSource) and expected is not None:
        source.require(expected)
        return source
    names = data_parallel_names(source.manifest(), expected)
    return RenamedSource(source, names) if names else source


def data_parallel_names(manifest: Manifest, expected: Manifest | None) -> dict[str, str]:
    """Every name of the manifest to its name without DDP's `module.`; empty if that is not to be stripped."""
    own = list(manifest.by_name())
    new = without_data_parallel(own, None if expected is None else expected.by_name())
    return {} if new is own else dict(zip(own, new, strict=True))


def renamed(manifest: Manifest, names: Mapping[str, str]) -> Manifest:
    """The manifest with new names. A name that is not in the mapping stays."""
    return Manifest(
        tensors=tuple(
            msgspec.structs.replace(
                spec,
                name=names.get(spec.name, spec.name),
                aliases=tuple(names.get(alias, alias) for alias in spec.aliases),
            )
            for spec in manifest
        )
    )
