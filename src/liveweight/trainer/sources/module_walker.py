"""The module walker: finds a module's parameters and persistent buffers once, so that later passes need not walk the tree by name.

Owns the walk and the check that the tree has not changed since. It keeps the module's own dictionaries, never a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

from liveweight.errors import ManifestInvalid
from liveweight.spec.tensor_names import ADAPTERS, check_no_adapter

if TYPE_CHECKING:
    import torch

_Tensors: TypeAlias = "dict[str, torch.Tensor | None]"


_Modules: TypeAlias = "dict[str, torch.nn.Module | None]"
_Node: TypeAlias = "tuple[str, _Tensors, int, _Tensors, int, _Modules, tuple[torch.nn.Module | None, ...]]"
"""One module as it was walked: its name; its parameters, buffers and children, and how many, or which, there were."""


@dataclass(slots=True)
class ModuleWalker:
    """What `state_dict` would hold, in its order, as (dictionary, key) pairs.

    Names are without the `module.` of DistributedDataParallel and DataParallel, which are known by their types: a child of a model that is
    called `module` keeps its name. Other wrappers have spellings of their own, which spec/tensor_names strips.
    """

    names: list[str] = field(default_factory=list)
    _slots: list[tuple[_Tensors, str]] = field(default_factory=list)
    _absent: list[tuple[str, _Tensors, str]] = field(default_factory=list)
    _nodes: list[_Node] = field(default_factory=list)
    _merged: list[tuple[str, torch.nn.Module]] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleWalker:
        """Walk a module. The tensors of merged adapters are left out; unmerged ones are refused."""
        module_walker = cls()
        module_walker._enter(module, "")
        return module_walker

    def tensors(self) -> list[torch.Tensor]:
        """What the names hold now; ManifestInvalid if the module is no longer made as it was."""
        for name, parameters, own, buffers, further, modules, children in self._nodes:
            same = len(parameters) == own and len(buffers) == further
            if not same or ((children or modules) and tuple(modules.values()) != children):
                raise ManifestInvalid(
                    f"module {name or 'itself'} has other parts than when its manifest was made"
                )
        for name, layer in self._merged:
            check_merged(layer, name)
        for name, tensors, key in self._absent:
            if tensors.get(key) is not None:
                raise ManifestInvalid(f"{name} was None when the manifest was made, and is a tensor now")
        held = [tensors.get(key) for tensors, key in self._slots]
        for name, tensor in zip(self.names, held, strict=True):
            if tensor is None:
                raise ManifestInvalid(f"{name} was removed after its manifest was made")
        return cast("list[torch.Tensor]", held)

    def _enter(self, module: torch.nn.Module, prefix: str) -> None:
        parameters, buffers, modules = _parts(module)
        sizes = len(parameters), len(buffers)
        self._nodes.append(
            (
                prefix.removesuffix("."),
                parameters,
                sizes[0],
                buffers,
                sizes[1],
                modules,
                tuple(modules.values()),
            )
        )
        for tensors, key in _own(module):
            if tensors[key] is None:
                self._absent.append((prefix + key, tensors, key))
            else:
                self.names.append(prefix + key)
                self._slots.append((tensors, key))
        for key, child in module._modules.items():
            if child is None:
                continue
            if key in ADAPTERS:
                check_merged(module, prefix + key)
                self._merged.append((prefix + key, module))
            elif key == "module" and is_data_parallel(module):
                self._enter(child, prefix)
            else:
                self._enter(child, f"{prefix}{key}.")


def is_data_parallel(module: torch.nn.Module) -> bool:
    """Whether it is a DistributedDataParallel or a DataParallel, which hold the model as their child `module`."""
    parallel = sys.modules["torch.nn.parallel"]
    return isinstance(module, (parallel.DistributedDataParallel, parallel.DataParallel))


def _parts(module: torch.nn.Module) -> tuple[_Tensors, _Tensors, _Modules]:
    """A module's own dictionaries, which torch keeps for its lifetime."""
    return cast("_Tensors", module._parameters), module._buffers, module._modules


def _own(module: torch.nn.Module) -> Iterator[tuple[_Tensors, str]]:
    """The parameters and persistent buffers of a module without its children; also those that are None."""
    parameters, buffers, _ = _parts(module)
    yield from ((parameters, key) for key in parameters)
    left_out = module._non_persistent_buffers_set
    yield from ((buffers, key) for key in buffers if key not in left_out)


def check_merged(layer: torch.nn.Module, name: str) -> None:
    """Refuse an adapter whose layer does not say that it is merged into the base weights."""
    if not getattr(layer, "merged", False):
        check_no_adapter(name, name.split("."))
