"""Tensors of torch or of the host: their dtype and shape as our types, where they lie, whether their bytes can be read, and views of a
Memory.

The only table between torch's dtypes and ours. torch is imported by those who call, never by importing this.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from liveweight.devices.memory import Memory
from liveweight.errors import ManifestInvalid, Unavailable
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.sources.host_tensor import HostTensor

if TYPE_CHECKING:
    import torch

AnyTensor: TypeAlias = "torch.Tensor | HostTensor"

StorageKey: TypeAlias = tuple[object, ...]
"""Where and how a tensor lies: equal for two tensors that share one storage in the same way."""


@functools.cache
def torch_dtypes() -> dict[DType, torch.dtype]:
    """Every dtype of ours as torch's."""
    import torch

    return {dtype: getattr(torch, dtype.value) for dtype in DType}


@functools.cache
def _spec_dtypes() -> dict[torch.dtype, DType]:
    return {theirs: ours for ours, theirs in torch_dtypes().items()}


def spec_dtype(name: str, dtype: torch.dtype) -> DType:
    """The dtype in our words; ManifestInvalid for one that cannot be published (complex, quantised, ...)."""
    known = _spec_dtypes().get(dtype)
    if known is None:
        raise ManifestInvalid(f"{name} is {str(dtype).removeprefix('torch.')}, which cannot be published")
    return known


def dtype_of(name: str, tensor: AnyTensor) -> DType:
    """The tensor's dtype in our words."""
    return tensor.dtype if isinstance(tensor, HostTensor) else spec_dtype(name, tensor.dtype)


def spec_of(name: str, tensor: AnyTensor) -> TensorSpec:
    """The tensor as an entry of a manifest; ManifestInvalid, with the reason, where its bytes cannot be read. Touches no bytes."""
    if isinstance(tensor, HostTensor):
        return TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)
    problem = _problem(tensor)
    if problem is not None:
        raise ManifestInvalid(f"{name} {problem}")
    return TensorSpec(name=name, dtype=spec_dtype(name, tensor.dtype), shape=tuple(tensor.shape))


def _problem(tensor: object) -> str | None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        return f"is not a tensor but {type(tensor).__name__}"
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run the module once before it is published"
    if is_distributed(tensor):
        return (
            "is a DTensor, of which this process may hold only a part: make a publisher on every rank and pass group= "
            "(an iterator gives full_tensor()s)"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        return f"is a {type(tensor).__name__}, whose bytes are not a plain tensor's"
    if tensor.layout != torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}, not dense"
    if tensor.is_meta:
        return "is on the meta device and has no bytes"
    return None


def without_gradients() -> AbstractContextManager[object]:
    """torch records nothing of what a source computes. Where it is not loaded, nothing is computed by it."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. One exists only where its module is loaded, which is not done here."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, getattr(distributed, "DTensor", ()))


def storage_key(tensor: AnyTensor) -> StorageKey:
    """Where and how a tensor lies. Every empty tensor has a key of its own."""
    if tensor.numel() == 0:
        return ("empty", id(tensor))
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def bytes_of(memory: Memory) -> torch.Tensor:
    """All bytes of a writable memory as one tensor of uint8, without a copy, wherever they lie.

    A view holds its memory's owner: the pages stay mapped as long as a view, or a parameter that is one, can be reached.
    """
    return memory.tensor()


def view(raw: torch.Tensor, placement: Placement, spec: TensorSpec) -> torch.Tensor:
    """The whole tensor that lies contiguously at its placement in these bytes."""
    import torch

    if spec.elements == 0:
        return torch.empty(spec.shape, dtype=torch_dtypes()[spec.dtype])
    part = raw[placement.offset_bytes : placement.offset_bytes + spec.size_bytes]
    return part.view(torch_dtypes()[spec.dtype]).view(spec.shape)


def copy_into(memory: Memory, placement: Placement, spec: TensorSpec, tensor: AnyTensor) -> None:
    """Copy a tensor, and cast it, to its placement without a kernel: by torch, or by NumPy."""
    try:
        if isinstance(tensor, HostTensor):
            first = placement.offset_bytes
            memory.bytes()[first : first + spec.size_bytes] = tensor.cast(spec.dtype)
        else:
            view(bytes_of(memory), placement, spec).copy_(tensor)
    except Exception as error:
        raise Unavailable(f"{spec.name} could not be copied from {tensor.device}: {error}") from error


def extent_bytes(tensor: AnyTensor) -> int:
    """How many bytes lie between the first byte of a strided tensor and the end of its last element."""
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize


def strides_bytes(tensor: AnyTensor) -> tuple[int, ...]:
    """Its strides, in bytes."""
    return tuple(stride * tensor.itemsize for stride in tensor.stride())
