"""Where vLLM's loading puts the tensors of a checkpoint, learned from that loading itself.

A twin of the model, whose parameters have no memory, loads tensors that have none either, and every copy is noted: which part of a
tensor goes where in which parameter. Tensors that are changed on their way, or whose loading cannot be followed, are left out.
Knows vLLM's internals, like workers/compat; does not touch the serving model. Whether and when the trace is used to copy is decided in
workers/install.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liveweight.errors import WrongState
from liveweight.spec.manifest import TensorSpec

UNCHANGED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
"""Quantisation methods that keep weights as they were loaded, unless the layer packs them."""
CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""What a loader may write besides a tensor's own values: padding."""
BUFFERS = ("cos_sin_cache", "inv_freq", "normalizer", "_q_scale", "_k_scale", "_v_scale", "_prob_scale")
"""Floating-point buffers that are not made from weights. Any other buffer may be: some loaders keep a second copy of weights in one."""
NO_WEIGHTS = ("kv_cache", "_k_scale_cpu", "_v_scale_cpu")
"""Tensors of attention that are neither parameters nor made from any: its cache, and scales that are constant unless attention has a
quantisation method of its own."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A part of a tensor's memory, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """The memory that this tensor covers."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of another tensor of the same layout."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCopy:
    """This part of a checkpoint's tensor is copied unchanged to that part of a parameter."""

    tensor: str
    source: TensorView
    layer: Any
    parameter: str
    destination: TensorView

    def held(self) -> torch.Tensor | None:
        """What the model holds there now; None if the layer does not keep weights as they were loaded."""
        live = self.layer._parameters.get(self.parameter)
        if live is None or not _kept_as_loaded(self.layer, self.parameter, live):
            return None
        return self.destination.within(live.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingTrace:
    """The copies that loading makes. `complete`: every tensor is copied to a place, loading does nothing else, and the model computes with
    nothing made from weights but the parameters themselves. Then making these copies is the same as loading."""

    places: tuple[TracedCopy, ...]
    complete: bool


def trace(model: Any, groups: Iterable[Sequence[TensorSpec]]) -> LoadingTrace:
    """Trace the loading of these tensors. Each group is loaded together; a group that cannot be followed does not affect the others."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    parameters: dict[int, tuple[Any, str]] = {}
    twins: dict[Any, Any] = {}
    twin = _twin(model, twins, parameters)
    before = {layer: _state(layer) for layer in twins.values()}
    places: list[TracedCopy] = []
    complete = not any(_derives(layer) for layer in twins)
    for group in groups:
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.value), device="meta")
            for spec in group
        }
        noted = _Copies({_storage(tensor): name for name, tensor in tensors.items()}, parameters)
        try:
            with torch.no_grad(), disable_mtp_completeness_check(), noted:
                # The class's own method, not one that somebody set on the model itself.
                type(twin).load_weights(twin, iter(tensors.items()))
        except Exception:  # vLLM's, of any kind: such as a loader that asks for values
            complete = False
            continue
        kept = [one for one in noted.found if (one.layer, one.parameter) not in noted.changed]
        complete = complete and not noted.changed and {one.tensor for one in kept} == set(tensors)
        places += kept
    complete = complete and all(_state(layer) == state for layer, state in before.items())
    return LoadingTrace(places=tuple(places), complete=complete)


def _state(layer: Any) -> dict[str, int]:
    """What a layer holds, by identity: its attributes, and where the memory of its parameters and buffers is."""
    held = {name: id(value) for name, value in vars(layer).items()}
    tensors = {**layer._parameters, **layer._buffers}
    return held | {f"tensor {name}": _storage(one) for name, one in tensors.items() if one is not None}


def _derives(layer: Any) -> bool:
    """Whether a layer computes with anything that was made from its weights when they were loaded."""
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in UNCHANGED:
        return True
    inside = {**vars(layer), **getattr(getattr(layer, "impl", None), "__dict__", {})}
    made = (value for name, value in inside.items() if name not in (*NO_WEIGHTS, "_parameters", "_buffers"))
    return _packed(layer) or _mirrors(layer) or any(_has_tensors(value) for value in made)


def _has_tensors(value: object) -> bool:
    values = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    )
    return any(isinstance(one, torch.Tensor) for one in values)


def _mirrors(layer: Any) -> bool:
    """Whether a buffer may be made from weights: floating-point, not in BUFFERS, and not a parameter's own memory."""
    own = {_storage(parameter) for parameter in layer._parameters.values() if parameter is not None}
    return any(
        buffer is not None
        and buffer.is_floating_point()
        and name not in BUFFERS
        and _storage(buffer) not in own
        for name, buffer in layer._buffers.items()
    )


def _packed(layer: Any) -> bool:
    """Whether the layer computes with a packed copy of its weights, on a CPU: the function that computes holds the copy."""
    return getattr(getattr(layer, "cpu_linear", None), "__closure__", None) is not None


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied from tensors into parameters, and which parameters get something else."""

    def __init__(self, tensors: Mapping[int, str], parameters: Mapping[int, tuple[Any, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._parameters = tensors, parameters
        self.found: list[TracedCopy] = []
        self.changed: set[tuple[Any, str]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func._schema.is_mutable and args and not args[0].is_meta:
            raise WrongState("tracing", "a change of memory that may serve")
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        elif func._schema.is_mutable and func not in CONSTANT and args:
            self._change(args[0])
        return func(*args, **(kwargs or {}))

    def _change(self, into: torch.Tensor) -> None:
        if (place := self._parameters.get(_storage(into))) is not None:
            self.changed.add(place)

    def _note(self, into: torch.Tensor, source: torch.Tensor) -> None:
        place, name = self._parameters.get(_storage(into)), self._tensors.get(_storage(source))
        if place is None:
            return
        layer, parameter = place
        same = name is not None and (into.dtype, into.shape) == (source.dtype, source.shape)
        if name is None or not same or parameter in layer._buffers:
            self._change(into)
            return
        self.found.append(
            TracedCopy(
                tensor=name,
                source=TensorView.of(source),
                layer=layer,
                parameter=parameter,
                destination=TensorView.of(into),
            )
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _twin(layer: Any, seen: dict[Any, Any], parameters: dict[int, tuple[Any, str]]) -> Any:
    """Copy the layers, with parameters as they are during loading, without memory. `parameters` maps storages to layer and name."""
    if layer in seen:
        return seen[layer]
    seen[layer] = twin = copy.copy(layer)
    own = {**{name: p for name, p in layer._parameters.items() if p is not None}, **_as_loaded(layer)}
    twin._parameters = {name: _without_memory(parameter, layer, twin) for name, parameter in own.items()}
    twin._buffers = {
        name: None if buffer is None else _without_memory(buffer, layer, twin)
        for name, buffer in layer._buffers.items()
    }
    twin._modules = {
        name: None if child is None else _twin(child, seen, parameters)
        for name, child in layer._modules.items()
    }
    for name, tensor in {**twin._parameters, **twin._buffers}.items():
        if tensor is not None:
            parameters[_storage(tensor)] = (layer, name)
    return twin


def _without_memory(parameter: torch.Tensor, layer: Any, twin: Any) -> torch.Tensor:
    """A layer's tensor for its twin: without memory, and with the twin's loader."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs

    bare: Any = torch.empty_strided(
        tuple(parameter.size()), parameter.stride(), dtype=parameter.dtype, device="meta"
    )
    bare.__class__ = parameter.__class__
    bare.__dict__ = parameter.__dict__.copy()
    restored: Any = restore_layer_refs(bare, twin)
    if hasattr(
        restored, "weight_loader"
    ):  # after a reload it is a loader that waits for the rest of its layer
        restored.weight_loader = _get_original_loader(restored)
    tensor: torch.Tensor = restore_layer_refs(sanitize_layer_refs(restored, layer), twin)
    return tensor


def _as_loaded(layer: Any) -> dict[str, torch.Tensor]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters: dict[str, torch.Tensor] = get_layerwise_info(layer).restore_metadata[0]
    return parameters


def _kept_as_loaded(layer: Any, name: str, live: torch.Tensor) -> bool:
    """Whether that parameter is what the layer computes with, in the layout in which it was loaded."""
    method = getattr(layer, "quant_method", None)
    if method is not None and type(method).__name__ not in UNCHANGED:
        return False
    if _packed(layer) and type(layer).__name__ != "VocabParallelEmbedding":
        return False
    loaded = _as_loaded(layer).get(name, live)
    return (loaded.shape, loaded.stride(), loaded.dtype) == (live.shape, live.stride(), live.dtype)
