"""Tensors of torch or of the host: their dtype and shape as our types, where they lie, and whether their bytes can be read.

The only table between torch's dtypes and ours. torch is imported by those who call, never by importing this.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from liveweight.errors import ManifestInvalid
from liveweight.spec.dtype import DType
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
