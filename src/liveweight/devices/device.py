"""The port of a device: what differs between host memory and a GPU's, for a rank's shadow and for a source's arena.

Owns the port, the host's implementation and what a name means. The GPU's implementation is in cuda.py, imported when a GPU is named: with
the host as device, nothing of CUDA is touched. transports/ shares the memory with other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from liveweight.devices import cpu
from liveweight.devices.kernels import ChosenKernels, Kernels, choose
from liveweight.devices.memory import Memory

if TYPE_CHECKING:
    import torch


class Handles(Protocol):
    """How memory of a device crosses to another process of this host: as bytes that name it. (The host's crosses by descriptor.)"""

    def lend(self, memory: Memory) -> bytes:
        """A handle, good for one opening in another process: one for each reader, not for each round."""

    def borrow(self, handle: bytes, size_bytes: int) -> Memory:
        """What another process lent, read-only. WireError for bytes that are no handle, LayoutInvalid for another device's."""


class Device(Protocol):
    """One device, as a rank or a source uses it. Any thread may call."""

    @property
    def name(self) -> str:
        """What this process calls it, with its index: `cpu`, `cuda:0`."""

    @property
    def identity(self) -> str:
        """What every process of this host calls it. Equal for two that can read each other's memory there."""

    @property
    def torch_device(self) -> torch.device:
        """Where torch says that its tensors are."""

    @property
    def handles(self) -> Handles | None:
        """How its memory is lent; None: as pages that others map."""

    def choose(self) -> ChosenKernels:
        """The kernels that write and digest its memory. A run is over when it returns: no read or write of it is still queued."""

    def allocate(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """So many bytes of zeros each, as tensors that keep them, aligned; `what` is for the error. Raises OutOfMemory, and
        then leaves nothing."""

    def allocate_host(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """As `allocate`, in host memory from and to which the device copies at its full rate: pinned, where that matters."""

    def to_host(self) -> Kernels:
        """Kernels that write the host's memory with what lies on the device. A run is over when it returns."""

    def give_back(self, memories: Sequence[Memory]) -> int:
        """Return the pages of these memories to the system. Returns how many bytes. Addresses stay; the contents are lost. Raises
        Unavailable if the device cannot do that."""

    def synchronise(self) -> None:
        """Wait until all that this process has queued on the device is done: before its weights are swapped, or offered."""


class CpuDevice:
    """The host."""

    name = identity = "cpu"
    handles = None

    @property
    def torch_device(self) -> torch.device:
        """Where torch says that its tensors are."""
        import torch

        return torch.device("cpu")

    def choose(self) -> ChosenKernels:
        """The native kernels, or NumPy's."""
        return choose()

    def allocate(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Parts of one allocation, faulted in; each part is a storage of its own, so that saving one does not save all."""
        return cpu.allocate_tensors(sizes_bytes, what)[1]

    def allocate_host(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """The same: the device is the host."""
        return self.allocate(sizes_bytes, what)

    def to_host(self) -> Kernels:
        """Those of `choose`: the device is the host."""
        return self.choose().kernels

    def give_back(self, memories: Sequence[Memory]) -> int:
        """Whole pages; they are zeros when they are touched again."""
        return sum(cpu.give_back(memory) for memory in memories)

    def synchronise(self) -> None:
        """Nothing is ever queued here."""


CPU = CpuDevice()


def open_device(name: str) -> Device:
    """The device of that name. ValueError for a name that means none, Unavailable where this machine lacks it."""
    if name == CPU.name:
        return CPU
    if not name.startswith("cuda"):
        raise ValueError(f"device {name} is neither cpu nor a CUDA device with an index, as in cuda:0")
    from liveweight.devices.cuda import CudaDevice

    return CudaDevice(name)
