"""Memory: a run of bytes of this process, by address, and what keeps it alive.

Owns no pages: the owner allocates, maps and closes them. A Memory only keeps its owner alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from liveweight.errors import LayoutInvalid

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """`size_bytes` bytes from `address` on. `owner` is whatever must live as long as somebody may touch them."""

    address: int
    size_bytes: int
    writable: bool
    owner: object

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.address < 0 or self.address + self.size_bytes >= 1 << 63:
            raise ValueError(f"memory of {self.size_bytes} bytes at address {self.address}")

    @classmethod
    def from_array(cls, array: npt.NDArray[Any]) -> Self:
        """The bytes of a contiguous NumPy array."""
        if not array.flags.c_contiguous:
            raise LayoutInvalid(
                f"an array of shape {array.shape} and strides {array.strides} is not one run of bytes"
            )
        return cls(
            address=array.ctypes.data,
            size_bytes=array.nbytes,
            writable=bool(array.flags.writeable),
            owner=array,
        )

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> Self:
        """The bytes of anything with a contiguous buffer (bytes, memoryview, mmap): it stays exported while the Memory lives."""
        return cls.from_array(np.frombuffer(memoryview(buffer).cast("B"), dtype=np.uint8))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Self:
        """The whole storage of a torch tensor on the CPU. Offsets count from the storage's first byte, not from the view's.

        The storage must not be resized while the Memory is used: torch would move it.
        """
        if tensor.device.type != "cpu":
            raise LayoutInvalid(f"a tensor on {tensor.device} has no memory that the host's kernels can read")
        storage = tensor.untyped_storage()
        return cls(address=storage.data_ptr(), size_bytes=storage.nbytes(), writable=True, owner=storage)

    @classmethod
    def of_view(cls, view: torch.Tensor, *, writable: bool = True) -> Self:
        """What a tensor without gaps covers, on any device: from its first element on, as many bytes as it has elements for."""
        size_bytes = view.numel() * view.element_size()
        return cls(address=view.data_ptr(), size_bytes=size_bytes, writable=writable, owner=view)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes as an array that holds this memory; read-only where the memory is. LayoutInvalid for a device's."""
        device = str(getattr(self.owner, "device", "cpu"))
        if device != "cpu":
            raise LayoutInvalid(f"memory on {device} has no bytes that the host can reach")
        return np.asarray(_Interface(self))

    def tensor(self) -> torch.Tensor:
        """The bytes of a writable memory as one tensor of uint8, without a copy, wherever they lie."""
        import torch

        owner = self.owner
        if isinstance(owner, torch.Tensor) and owner.device.type != "cpu":
            return owner.view(torch.uint8).view(-1)
        return torch.from_numpy(self.bytes())


class _Interface:
    """A memory with NumPy's array interface: the array keeps this object, and this object the memory."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (memory.size_bytes,),
            "data": (memory.address, not memory.writable),
        }
