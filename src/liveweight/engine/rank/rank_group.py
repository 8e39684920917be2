"""The group of ranks: processes on one host that share a model's weights, over gloo on the CPU and NCCL on GPUs.

Made once, checked at start. It stays on the loopback device and uses no global state of torch.distributed. A collective that failed means
that a peer is gone; the group is not used again.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from liveweight.engine.models.forward import Group, Solo
from liveweight.engine.rank.shared_memory_group import RendezvousStore, SegmentUnshared, SharedGroup
from liveweight.errors import ChannelClosed, Unavailable

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"


def join_group(*, rank: int, size: int, rendezvous: Path, device: str, timeout_s: float) -> Group:
    """Connect to the other ranks. `rendezvous` is a file that all of them can reach and that nobody else uses."""
    if size == 1:
        return Solo()
    import torch.distributed as dist

    backend = "nccl" if device.startswith("cuda") else "gloo"
    there = dist.is_available() and (
        dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()
    )
    if not there:
        raise Unavailable(
            f"{size} ranks on {device} need torch.distributed with {backend}, and this torch has none"
        )
    try:
        store: Any = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
        ranks = RankGroup(collectives(dist, backend, rank, size, store, timeout_s), rank=rank, size=size)
        return ranks if backend == "nccl" else _over_shared_memory(ranks, store, timeout_s)
    except RuntimeError as error:
        raise ChannelClosed(f"the ranks did not find each other: {error}") from error


def _over_shared_memory(ranks: RankGroup, store: RendezvousStore, timeout_s: float) -> Group:
    """Use shared memory instead of sockets, if its C part was built and every rank can map it: all ranks, or none."""
    try:
        return SharedGroup(ranks, store, timeout_s=timeout_s)
    except (ImportError, SegmentUnshared):
        return ranks


def collectives(dist: Any, backend: str, rank: int, size: int, store: Any, timeout_s: float) -> Collectives:
    """The backend itself. (torch has no types for this part of it.)"""
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl: Collectives = dist.ProcessGroupNCCL(store, rank, size, options)
        return nccl
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo: Collectives = dist.ProcessGroupGloo(store, rank, size, options)
    return gloo


class _Work(Protocol):
    def wait(self) -> object: ...


class Collectives(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work:
        """Sum in place."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Work:
        """Everybody's inputs, on everybody."""


class RankGroup:
    """One rank's end of a group of several."""

    def __init__(self, group: Collectives, *, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all parts, in the argument's memory."""
        try:
            self._group.allreduce([part]).wait()
        except RuntimeError as error:
            raise ChannelClosed(f"a peer of rank {self.rank} is gone: {error}") from error
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All parts side by side along the last dimension."""
        import torch

        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise ChannelClosed(f"a peer of rank {self.rank} is gone: {error}") from error
        return torch.cat(parts, dim=-1)
