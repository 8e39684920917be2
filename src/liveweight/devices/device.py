"""The port of a device: what differs between host memory and a GPU's, for a rank's shadow and for a source's arena.

Owns the port, the host's implementation and what a name means. The GPU's is cuda's, imported when one is named: where the device is
the host, nothing of CUDA is touched. How memory that others may read travels is transports/'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from liveweight.devices import cpu
from liveweight.devices.kernels import Chosen, choose
from liveweight.devices.memory import Memory
from liveweight.spec.layout import ALIGNMENT_BYTES, align

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

    def choose(self) -> Chosen:
        """The kernels that write and digest its memory. A run is over when it returns: no read or write of it is still queued."""

    def allocate(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """So many bytes of zeros each, as tensors that keep them, aligned; `what` is for the error. OutOfMemory: none is left."""

    def synchronise(self) -> None:
        """Wait until all that this process has queued on the device is done: before its weights are exchanged, or offered."""


class CpuDevice:
    """The host."""

    name = identity = "cpu"
    handles = None

    @property
    def torch_device(self) -> torch.device:
        """Where torch says that its tensors are."""
        import torch

        return torch.device("cpu")

    def choose(self) -> Chosen:
        """The native kernels, or NumPy's."""
        return choose()

    def allocate(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Parts of one allocation, faulted in; each part is a storage of its own, so that saving one does not save all."""
        import torch

        aligned = (align(size, ALIGNMENT_BYTES) for size in sizes_bytes)
        *offsets, total = itertools.accumulate(aligned, initial=0)
        with torch.inference_mode(False), cpu.allocate(total, what) as allocation:
            pages = (
                allocation.memory.bytes()
            )  # slices of it, and tensors of those, keep the pages after `close`
            parts = zip(offsets, sizes_bytes, strict=True)
            return [torch.from_numpy(pages[offset : offset + size]) for offset, size in parts]

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
