"""Merged adapters: the weights of a PEFT model with its LoRA added, without touching the base.

`merge_adapter()` and `unmerge_adapter()` around every publish round a 16-bit base each time. Here the sum is a new tensor, one at a time.
Owns the walk over PEFT's wrappers, which are known by their types. PEFT is used if the model's program has loaded it, and never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from liveweight.errors import ManifestInvalid
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.tensor_names import clean
from liveweight.trainer.sources.module_walker import is_data_parallel
from liveweight.trainer.sources.tensors import is_distributed, spec_of, storage_key

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the merged model. `base` has its dtype and shape; `add` are in-place additions to a copy of it; `key` is equal for
    names that are one tensor."""

    name: str
    base: torch.Tensor
    key: object
    add: tuple[Callable[[torch.Tensor], object], ...] = ()

    def tensor(self) -> torch.Tensor:
        """The base itself if nothing is to be added; else a new tensor."""
        if not self.add:
            return self.base
        import torch

        with torch.no_grad():
            merged = self.base.detach().clone()
            for add in self.add:
                add(merged)
        return merged


class MergedSource:
    """A module with PEFT adapters, as `merge_and_unload()` of a copy would leave it: under the same names, with the same bits, but for
    an adapter on one of two tied weights, which parts them.

    LoRA of `Linear` and `Embedding` is added on the way; of `modules_to_save` the active copy is taken. Other tuners are refused by name
    while they are not merged.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @property
    def held(self) -> bool:
        """Whether every tensor exists: at present, all adapters are merged into the base."""
        return not any(entry.add for entry in self._entries())

    @property
    def sharded(self) -> bool:
        """Whether a parameter is a DTensor, of which this process may hold only a part."""
        return any(map(is_distributed, self.module.parameters()))

    def manifest(self) -> Manifest:
        """Walks the module anew. Computes nothing."""
        specs: dict[object, TensorSpec] = {}
        for entry in self._entries():
            known = specs.get(entry.key)
            if known is None:
                specs[entry.key] = spec_of(entry.name, entry.base)
            else:
                specs[entry.key] = msgspec.structs.replace(known, aliases=(*known.aliases, entry.name))
        return Manifest(tensors=tuple(specs.values()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One pass: each sum is made when it is asked for, and not kept."""
        seen = set()
        for entry in self._entries():
            if entry.key not in seen:
                seen.add(entry.key)
                yield entry.name, entry.tensor()

    def gradients(self) -> dict[str, bool]:
        """For every parameter, whether training changes it: it requires a gradient, or an adapter is added to it."""
        import torch

        trained: dict[object, bool] = {}
        names: dict[str, object] = {}
        for entry in self._entries():
            if isinstance(entry.base, torch.nn.Parameter):
                names[entry.name] = entry.key
                trained[entry.key] = (
                    trained.get(entry.key, False) or entry.base.requires_grad or bool(entry.add)
                )
        return {name: trained[key] for name, key in names.items()}

    def _entries(self) -> Iterator[_Entry]:
        yield from _walk(self.module, "", _Peft(sys.modules["peft"]))


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether a part of the module is PEFT's. A PEFT without LoraVariant is too old: its adapters must be merged."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not hasattr(peft.tuners.lora.layer, "LoraVariant"):
        return False
    return any(map(_Peft(peft).is_part, module.modules()))


class _Peft:
    """PEFT's classes, of the package that is loaded."""

    def __init__(self, peft: Any) -> None:
        self.model = peft.PeftModel
        self.tuner = peft.tuners.tuners_utils.BaseTuner
        self.layer = peft.tuners.tuners_utils.BaseTunerLayer
        self.wrapper = peft.utils.other.AuxiliaryTrainingWrapper
        self.saved = peft.utils.other.ModulesToSaveWrapper
        self.linear = peft.tuners.lora.layer.Linear
        self.embedding = peft.tuners.lora.layer.Embedding

    def is_part(self, module: object) -> bool:
        return isinstance(module, (self.model, self.layer, self.wrapper))


def _walk(module: Any, prefix: str, peft: _Peft) -> Iterator[_Entry]:
    """What the merged module's state dict would hold, in its order. `prefix` is "" or ends with a dot."""
    if isinstance(module, peft.model):
        if not isinstance(module.base_model, peft.tuner):
            raise ManifestInvalid(
                f"{prefix or 'the model '}is a PEFT model of a kind that has no weights to merge "
                f"({type(module.base_model).__name__} with prompts): publish its base model, and send the prompts with the requests"
            )
        yield from _walk(module.base_model.model, prefix, peft)
    elif isinstance(module, peft.tuner):
        yield from _walk(module.model, prefix, peft)
    elif is_data_parallel(module):
        yield from _walk(module.module, prefix, peft)
    elif isinstance(module, peft.saved):
        active = module.active_adapters
        used = module.modules_to_save[active[0]] if active else module.original_module
        yield from _walk(used, prefix, peft)
    elif isinstance(module, peft.wrapper):
        raise ManifestInvalid(_cannot(prefix, module))
    elif isinstance(module, peft.layer):
        yield from _layer(module, prefix, peft)
    else:
        yield from _plain(module, prefix, peft, {})


def _plain(
    module: Any, prefix: str, peft: _Peft, added: dict[str, list[Callable[[torch.Tensor], object]]]
) -> Iterator[_Entry]:
    """A module without adapters of its own. `added`: what is to be added to which of its tensors."""
    left_out = module._non_persistent_buffers_set
    own = {**module._parameters, **{k: b for k, b in module._buffers.items() if k not in left_out}}
    for key, tensor in own.items():
        if tensor is None:
            continue
        add = tuple(added.get(key, ()))
        identity = ("merged", id(module), key) if add else storage_key(tensor)
        yield _Entry(clean(prefix + key), tensor, identity, add)
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{key}.", peft)


def _layer(layer: Any, prefix: str, peft: _Peft) -> Iterator[_Entry]:
    """A layer with adapters: its base layer, with what is not merged yet to be added, adapter by adapter, as PEFT's `merge` does."""
    embedding = type(layer) is peft.embedding
    pending = [name for name in layer.active_adapters if name not in layer.merged_adapters]
    if type(layer) is not peft.linear and not embedding:
        if pending:
            raise ManifestInvalid(_cannot(prefix, layer))
        pending = []
    if isinstance(layer.base_layer, peft.layer) and pending:
        raise ManifestInvalid(_cannot(prefix, layer))
    factors = layer.lora_embedding_A if embedding else getattr(layer, "lora_A", {})
    added: dict[str, list[Callable[[torch.Tensor], object]]] = {}
    for name in pending:
        if name not in factors:
            continue
        if name in layer.lora_variant:
            raise ManifestInvalid(_cannot(prefix, layer, type(layer.lora_variant[name]).__name__))
        added.setdefault("weight", []).append(_weight(layer, name, cast=embedding))
        if layer.lora_bias[name]:
            added.setdefault("bias", []).append(_bias(layer, name))
    if isinstance(layer.base_layer, peft.layer):
        yield from _layer(layer.base_layer, prefix, peft)
    else:
        yield from _plain(layer.base_layer, prefix, peft, added)


def _weight(layer: Any, adapter: str, *, cast: bool) -> Callable[[torch.Tensor], object]:
    def add(weight: torch.Tensor) -> object:
        delta = layer.get_delta_weight(adapter)
        return weight.add_(delta.to(weight.dtype) if cast else delta)  # as PEFT rounds: embeddings first

    return add


def _bias(layer: Any, adapter: str) -> Callable[[torch.Tensor], object]:
    return lambda bias: bias.add_(layer.lora_B[adapter].bias * layer.scaling[adapter])


def _cannot(prefix: str, module: object, kind: str | None = None) -> str:
    named = prefix.removesuffix(".") or "the model"
    return (
        f"{clean(named)} is trained by PEFT's {kind or type(module).__name__}, which is not merged on the way "
        "(LoRA of Linear and Embedding is): publish a dict, and give it "
        "copy.deepcopy(model).merge_and_unload().state_dict() before every version"
    )
