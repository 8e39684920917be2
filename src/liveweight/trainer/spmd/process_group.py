"""A trainer's process group. It is used for two collectives when the ranks join: the host of every rank, and the address of rank 0.

Plain tensors, no pickle, on the device that the group's backend takes. A collective that fails or exceeds the deadline fails the join.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from liveweight.errors import ChannelClosed, Unavailable
from liveweight.spec.deadline import Deadline
from liveweight.wire.host_identity import this_host

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_HOST_BYTES = 32
_ADDRESS_BYTES = 1024


class TrainerGroup:
    """Used by one thread, the same calls on every rank in the same order."""

    def __init__(self, group: ProcessGroup, deadline: Deadline) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise Unavailable("a group of ranks needs torch.distributed, initialised")
        self._dist, self._group, self._deadline = dist, group, deadline
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise Unavailable("this process is no rank of the group")
        self._hosts: tuple[bytes, ...] | None = None

    def hosts(self) -> tuple[bytes, ...]:
        """By rank: equal for two only if sockets and process ids of one mean the same to the other. Asked once."""
        if self._hosts is None:
            mine = self._packed(hashlib.sha256(this_host().encode()).digest(), _HOST_BYTES)
            theirs = [mine.new_empty(mine.shape) for _ in range(self.world)]
            self._wait(self._dist.all_gather(theirs, mine, group=self._group, async_op=True))
            self._hosts = tuple(bytes(one.tolist()) for one in theirs)
        return self._hosts

    def broadcast_address(self, address: str) -> str:
        """Rank 0's address, on every rank."""
        packed = self._packed(address.encode(), _ADDRESS_BYTES)
        source = self._dist.get_global_rank(self._group, 0)
        self._wait(self._dist.broadcast(packed, src=source, group=self._group, async_op=True))
        return bytes(packed.tolist()).rstrip(b"\0").decode()

    def _packed(self, data: bytes, size: int) -> torch.Tensor:
        import torch

        home = (
            f"cuda:{torch.cuda.current_device()}" if self._dist.get_backend(self._group) == "nccl" else "cpu"
        )
        return torch.tensor(list(data.ljust(size, b"\0")), dtype=torch.uint8, device=home)

    def _wait(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, self._deadline.remaining_s())))
        except RuntimeError as error:
            raise ChannelClosed(
                f"the trainer's ranks did not reach each other over their process group: {error}"
            ) from error
