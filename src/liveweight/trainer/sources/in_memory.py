"""Sources that live in this process: a module, a state dict, an iterator with metadata. And `as_source`, which picks.

They give out references to the trainer's tensors; nothing is copied or kept here. Files are CheckpointSource's (checkpoint.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from liveweight.checkpoint import CheckpointSource
from liveweight.errors import ManifestInvalid, Refused
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.trainer.sources.merged_adapters import MergedSource, has_adapters
from liveweight.trainer.sources.module_walker import ModuleWalker
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.tensors import AnyTensor, spec_dtype
from liveweight.trainer.sources.tied_tensors import UniqueTensors, find_unique_tensors

if TYPE_CHECKING:
    import torch

Metadata: TypeAlias = "TensorSpec | tuple[str, DType | torch.dtype | str, Sequence[int]]"
"""One entry of an iterator's metadata: a spec, or (name, dtype, full shape)."""


class ModuleSource:
    """The parameters and persistent buffers of a module, under the names of its state dict without wrappers."""

    held = True

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._walked: tuple[ModuleWalker, UniqueTensors] | None = None

    def manifest(self) -> Manifest:
        """Walks the module anew: later passes follow, and are compared with, this manifest."""
        return self._walk()[1].manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters as they are now; a module that was rebuilt since its manifest is refused."""
        module_walker, unique_tensors = self._walked or self._walk()
        return unique_tensors.walk(module_walker.tensors())

    def _walk(self) -> tuple[ModuleWalker, UniqueTensors]:
        module_walker = ModuleWalker.of(self.module)
        self._walked = module_walker, find_unique_tensors(module_walker.names, module_walker.tensors())
        return self._walked


class StateDictSource:
    """A mapping from names to tensors. The mapping is the trainer's: a pass gives what it holds then."""

    held = True

    def __init__(self, tensors: Mapping[str, AnyTensor]) -> None:
        self._tensors = tensors
        self._walked: tuple[list[str], UniqueTensors] | None = None

    def manifest(self) -> Manifest:
        """Later passes follow, and are compared with, this manifest."""
        return self._walk()[1].manifest

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """The tensors that the mapping holds now, under the names that its manifest listed."""
        names, unique_tensors = self._walked or self._walk()
        differing = sorted(set(names) ^ set(self._tensors))
        if differing:
            raise ManifestInvalid(f"the mapping's names changed after its manifest was made: {differing[0]}")
        return unique_tensors.walk([self._tensors[name] for name in names])

    def _walk(self) -> tuple[list[str], UniqueTensors]:
        names = list(self._tensors)
        self._walked = names, find_unique_tensors(names, list(self._tensors.values()))
        return self._walked


class IteratorSource:
    """Tensors that are made one by one, such as gathered shards: a list of what will come, and a factory of passes.

    A tensor is read before the next one is asked for, and not kept: the iterator may reuse its memory. Names are taken as they are;
    only the `module.` of DDP goes, if every name has it and the engine expects the names without it.
    """

    held = False

    def __init__(
        self, metadata: Sequence[Metadata], factory: Callable[[], Iterable[tuple[str, AnyTensor]]]
    ) -> None:
        self._manifest = Manifest(tensors=tuple(_spec(entry) for entry in metadata))
        self._factory = factory

    def manifest(self) -> Manifest:
        """What the metadata says."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """A new pass of the factory."""
        return iter(self._factory())


def as_source(given: object) -> Source:
    """A source from a torch module, a mapping of tensors, the path of an HF checkpoint directory, or a source itself."""
    torch = sys.modules.get("torch")  # where torch is not loaded, nothing is a module of it
    if torch is not None and isinstance(given, torch.nn.Module):
        return MergedSource(given) if has_adapters(given) else ModuleSource(given)
    match given:
        case Mapping():
            return StateDictSource(given)
        case str() | os.PathLike():
            return CheckpointSource(Path(given))
        case Source():
            return given
        case _:
            raise Refused(
                f"weights come from a torch module, a mapping of tensors, a checkpoint directory or a Source, "
                f"not from {type(given).__module__}.{type(given).__qualname__}"
            )


def _spec(entry: Metadata) -> TensorSpec:
    if isinstance(entry, TensorSpec):
        return msgspec.structs.replace(entry, digest=None)
    name, dtype, shape = entry
    return TensorSpec(name=name, dtype=_dtype(name, dtype), shape=tuple(int(size) for size in shape))


def _dtype(name: str, dtype: DType | torch.dtype | str) -> DType:
    if isinstance(dtype, DType):
        return dtype
    if not isinstance(dtype, str):
        return spec_dtype(name, dtype)
    try:
        return DType(dtype.removeprefix("torch."))
    except ValueError:
        raise ManifestInvalid(f"{name} is {dtype}, which cannot be published") from None
