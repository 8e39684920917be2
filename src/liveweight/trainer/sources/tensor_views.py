"""Views: tensors of torch that lie in a Memory, at the places of a layout.

A view holds its memory's owner: the pages stay mapped as long as a view, or a parameter that is one, can be reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from liveweight.devices.memory import Memory
from liveweight.errors import Unavailable
from liveweight.spec.layout import Placement
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.tensors import AnyTensor, torch_dtypes

if TYPE_CHECKING:
    import torch


def bytes_of(memory: Memory) -> torch.Tensor:
    """All bytes of a writable memory as one tensor of uint8, without a copy, wherever they lie."""
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
