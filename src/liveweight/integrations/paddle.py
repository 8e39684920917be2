"""A Paddle layer as a source: its parameters are read in place, without a copy. The trainer's environment needs Paddle, not torch.

Owns what is particular to Paddle: which weights Paddle stores transposed, and which of its tensors cannot be read. Everything else is the
publisher's (trainer/).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

from liveweight.errors import ManifestInvalid, Refused
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.tied_tensors import UniqueTensors, find_unique_tensors


def paddle_source(
    layer: Any, *, transpose: bool | Collection[str] = True, rename: Callable[[str], str] | None = None
) -> PaddleSource:
    """The parameters and persistent buffers of a `paddle.nn.Layer`, or a state dict of it, for `lw.Publisher`.

        with lw.Publisher(lw.paddle_source(layer), engines=URLS) as publisher:
            publisher.publish(step)

    Paddle keeps the weight of a `Linear` as [in, out]; torch, HF checkpoints and engines that serve them have [out, in]. With
    `transpose=True` those weights are offered as [out, in], without a copy: a view. False offers them as they are; names, which a state
    dict needs since it knows no layers, say which ones. `rename` gives an engine's name for one of Paddle's.

    Parameters in host memory are read where they lie when an offer is frozen, whatever their dtype, bfloat16 too. Those on a
    device are copied to the host first, one after another.
    """
    paddle = sys.modules.get("paddle")  # if Paddle is not imported, `layer` cannot be one of its layers
    if paddle is None or not isinstance(layer, Mapping | paddle.nn.Layer):
        raise Refused(f"a Paddle source is a paddle.nn.Layer or a state dict, not {type(layer).__name__}")
    return PaddleSource(paddle, layer, transpose, rename)


class PaddleSource:
    """See `paddle_source`. A Source: called from the thread that offers."""

    def __init__(
        self,
        paddle: ModuleType,
        layer: Any,
        transpose: bool | Collection[str],
        rename: Callable[[str], str] | None,
    ) -> None:
        if isinstance(layer, paddle.DataParallel):
            layer = layer._layers
        self._paddle, self._layer = paddle, layer
        self._transposed = _transposed(paddle, layer, transpose)
        self._rename = rename or (lambda name: name)
        self._taken: tuple[list[str], UniqueTensors] | None = None

    @property
    def held(self) -> bool:
        """Whether all parameters lie in host memory. Others are copied there, one after another."""
        return all(_on_host(tensor) for tensor in self._state().values())

    def manifest(self) -> Manifest:
        """Describe the parameters. Later passes yield tensors in this manifest's order, and are compared with it."""
        return self._take()[1].manifest

    def tensors(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield the current parameters. Raises ManifestInvalid if the layer's names changed since `manifest()`."""
        names, unique_tensors = self._taken or self._take()
        state = self._state()
        differing = sorted(set(names) ^ set(state))
        if differing:
            raise ManifestInvalid(f"the layer's names changed after its manifest was made: {differing[0]}")
        walk = unique_tensors.walk([self._described(name, state[name]) for name in names])
        for number, (name, found) in zip(unique_tensors.owners, walk, strict=True):
            copied = not _on_host(found.owner)
            yield name, self._described(names[number], state[names[number]].cpu()) if copied else found

    def _take(self) -> tuple[list[str], UniqueTensors]:
        state = self._state()
        absent = sorted(self._transposed - set(state))
        if absent:
            raise ManifestInvalid(f"{absent[0]} is to be transposed, and is not there")
        names = list(state)
        described = [self._described(name, tensor) for name, tensor in state.items()]
        self._taken = names, find_unique_tensors([self._rename(name) for name in names], described)
        return self._taken

    def _state(self) -> Mapping[str, Any]:
        """Paddle's own tensors by Paddle's own names."""
        found: Mapping[str, Any] = (
            self._layer if isinstance(self._layer, Mapping) else self._layer.state_dict()
        )
        return found

    def _described(self, name: str, tensor: Any) -> HostTensor:
        """Describe the tensor's memory. An address on a device serves only to recognise tied tensors."""
        problem = _problem(self._paddle, tensor, name in self._transposed)
        if problem is not None:
            raise ManifestInvalid(f"{name} {problem}")
        found = HostTensor(
            address=tensor.data_ptr(),
            dtype=_dtype(name, tensor),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.strides),
            owner=tensor,
        )
        return found.transposed() if name in self._transposed else found


def _transposed(paddle: ModuleType, layer: Any, transpose: bool | Collection[str]) -> frozenset[str]:
    if not isinstance(transpose, bool):
        return frozenset(transpose)
    if not transpose:
        return frozenset()
    if isinstance(layer, Mapping):
        raise Refused(
            "a state dict does not say which weights are a Linear's: give transpose= their names, or False"
        )
    return frozenset(
        f"{prefix}.weight" if prefix else "weight"
        for prefix, found in layer.named_sublayers(include_self=True)
        if isinstance(found, paddle.nn.Linear)
    )


def _problem(paddle: ModuleType, tensor: Any, transposed: bool) -> str | None:
    """Why a tensor's bytes cannot be read."""
    if not isinstance(tensor, paddle.Tensor):
        return f"is not a Paddle tensor but {type(tensor).__name__}"
    if transposed and len(tensor.shape) < 2:
        return f"is to be transposed, and has the shape {list(tensor.shape)}"
    if not tensor._is_initialized():
        return "is not initialised yet"
    if tensor.is_dist():
        return "is sharded over processes: this source takes whole tensors only"
    if not tensor.is_dense():
        return "is not dense"
    return None


def _dtype(name: str, tensor: Any) -> DType:
    given = str(tensor.dtype).removeprefix("paddle.")
    try:
        return DType(given)
    except ValueError:
        raise ManifestInvalid(f"{name} is {given}, which cannot be published") from None


def _on_host(tensor: Any) -> bool:
    """Whether the tensor's bytes are in host memory. `_problem` reports tensors without memory."""
    place = getattr(tensor, "place", None)
    return place is None or bool(place.is_cpu_place())
