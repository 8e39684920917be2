"""The trainer's processes: what one of them knows, told to all, so that all go on or all raise.

Plain bytes in tensors of the default process group, no pickle. Every process makes the same calls in the same order. A trainer of one
process needs no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from liveweight.errors import LiveWeightError
from liveweight.spec.decoders import from_msgpack
from liveweight.wire.messages.values import Fault, fault_of

if TYPE_CHECKING:
    import torch


class ProcessOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended at one process. `time_left`: whether that process would try again."""

    fault: Fault | None = None
    retryable: bool = False
    time_left: bool = False


class TrainerProcesses:
    """The processes of one trainer, as accelerate counts them."""

    def __init__(self, accelerator: Any) -> None:
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self._device = accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks to the engines."""
        return self.index == 0

    def gather(self, data: bytes) -> list[bytes]:
        """What every process gave, in the order of the processes, at every process."""
        if self.count == 1:
            return [data]
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        sizes = [torch.empty_like(size) for _ in range(self.count)]
        dist.all_gather(sizes, size)
        lengths = [int(one.item()) for one in sizes]
        packed = self._packed(data, max(lengths))
        parts = [torch.empty_like(packed) for _ in range(self.count)]
        dist.all_gather(parts, packed)
        return [_unpacked(part, length) for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """What the main process gave, at every process; what the others gave is not used."""
        if self.count == 1:
            return data
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        length = int(size.item())
        packed = self._packed(data if self.is_main else b"", length)
        dist.broadcast(packed, src=0)
        return _unpacked(packed, length)

    def agree(self, error: Exception | None, *, time_left: bool = False) -> bool:
        """Compare how a call ended at all processes. True: it succeeded everywhere. False: it failed, all failures are worth a retry,
        and the main process has time for one. Otherwise raises, everywhere: its own error, or else that of the first process that
        failed."""
        own = ProcessOutcome(
            fault=None if error is None else fault_at(error, self.index),
            retryable=isinstance(error, LiveWeightError) and error.retryable,
            time_left=time_left,
        )
        outcomes = [from_msgpack(raw, ProcessOutcome) for raw in self.gather(msgspec.msgpack.encode(own))]
        failed = [one for one in outcomes if one.fault is not None]
        if not failed:
            return True
        if outcomes[0].time_left and all(one.retryable for one in failed):
            return False
        if error is not None:
            raise error
        fault = failed[0].fault
        raise LiveWeightError("a process failed") if fault is None else fault.to_error()

    def _packed(self, data: bytes, size: int) -> torch.Tensor:
        import torch

        return torch.frombuffer(bytearray(data.ljust(max(1, size), b"\0")), dtype=torch.uint8).to(
            self._device
        )


def fault_at(error: Exception, index: int) -> Fault:
    """The error as the other processes get it."""
    if isinstance(error, LiveWeightError):
        named = type(error).retold(f"process {index} of the trainer: {error}")
        named.code = error.code
    else:
        named = LiveWeightError(f"process {index} of the trainer: {type(error).__name__}: {error}")
    return fault_of(named, step="trl", rank=index)


def _unpacked(packed: torch.Tensor, length: int) -> bytes:
    return packed.cpu().numpy().tobytes()[:length]
