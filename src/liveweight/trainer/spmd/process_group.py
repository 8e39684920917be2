"""A trainer's process group, as far as it is used: twice, when its ranks meet. A host's name from everyone, an address from rank 0.

Plain tensors, no pickle; on the device that the group's backend takes. A collective that fails, or is not over in time, ends the meeting.
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
            self._done(self._dist.all_gather(theirs, mine, group=self._group, async_op=True))
            self._hosts = tuple(bytes(one.tolist()) for one in theirs)
        return self._hosts

    def told(self, address: str) -> str:
        """Rank 0's address, on every rank."""
        word = self._packed(address.encode(), _ADDRESS_BYTES)
        source = self._dist.get_global_rank(self._group, 0)
        self._done(self._dist.broadcast(word, src=source, group=self._group, async_op=True))
        return bytes(word.tolist()).rstrip(b"\0").decode()

    def _packed(self, data: bytes, size: int) -> torch.Tensor:
        import torch

        home = (
            f"cuda:{torch.cuda.current_device()}" if self._dist.get_backend(self._group) == "nccl" else "cpu"
        )
        return torch.tensor(list(data.ljust(size, b"\0")), dtype=torch.uint8, device=home)

    def _done(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, self._deadline.remaining_s())))
        except RuntimeError as error:
            raise ChannelClosed(f"the trainer's ranks did not meet over their group: {error}") from error
