"""The boundary: how all ranks of a replica learn of a decision at the same step, and the slot in which a decision waits for that step.

A port with two implementations: a single process, and an SPMD program whose ranks broadcast rank 0's decision as one CPU tensor over
a gloo group. The group is checked once. After a failed collective the ranks need a new group; the old one is never used again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from liveweight.errors import ChannelClosed, Unavailable, WrongState
from liveweight.wire.messages.values import KvPolicy, RoundId

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NONE, _COMMIT, _UNDO = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Decision:
    """The leader's decision, which all ranks carry out at one step: swap shadow and live weights, or overwrite the live weights.

    `kv_policy` is for programs that keep requests; ranks do not use it.
    """

    epoch: int
    undo: bool
    timeout_s: float
    kv_policy: KvPolicy | None = None


class DecisionSink(Protocol):
    """Takes the leader's decisions, on the leader's thread. At most one decision waits at a time."""

    def put(self, round_id: RoundId, decision: Decision) -> None:
        """Let the next boundary carry the decision out."""

    def withdraw(self, round_id: RoundId) -> bool:
        """Take the decision back if it still waits. Returns whether it did."""


class DecisionSlot:
    """The leader puts a decision here, and rank 0's main thread takes it. At most one decision waits at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: tuple[RoundId, Decision] | None = None

    def put(self, round_id: RoundId, decision: Decision) -> None:
        """Let the next boundary carry the decision out. Called from the leader's thread."""
        with self._changed:
            self._waiting = (round_id, decision)
            self._changed.notify_all()

    def withdraw(self, round_id: RoundId) -> bool:
        """Take the decision back if it still waits. Returns whether it did."""
        with self._changed:
            waits = self._waiting is not None and self._waiting[0] == round_id
            if waits:
                self._waiting = None
            return waits

    def take(self, idle_s: float) -> Decision | None:
        """Take the waiting decision, or wait up to `idle_s` for one. None if there is none. Called from rank 0's main thread."""
        if self._waiting is None and idle_s <= 0:
            return None  # the normal state: no lock, no wait
        with self._changed:
            if self._waiting is None:
                self._changed.wait(idle_s)
            waiting, self._waiting = self._waiting, None
            return None if waiting is None else waiting[1]


class Boundary(Protocol):
    """Called by every rank's main thread, at the same step of the program."""

    def broadcast(self, decision: Decision | None) -> Decision | None:
        """Return rank 0's decision, or None, on every rank. The argument counts on rank 0 only."""


class SingleProcessBoundary:
    """A replica of one process: there are no other ranks."""

    def broadcast(self, decision: Decision | None) -> Decision | None:
        """Return the decision."""
        return decision


class BroadcastBoundary:
    """The ranks of an SPMD program: one broadcast of three numbers per boundary, on the CPU."""

    def __init__(self, group: ProcessGroup | None, rank: int, world: int) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            raise Unavailable("a replica of several processes needs torch.distributed with gloo")
        if dist.get_backend(group) != "gloo":
            raise Unavailable(f"the boundary's group must be gloo, not {dist.get_backend(group)}")
        found = (dist.get_rank(group), dist.get_world_size(group))
        if found != (rank, world):
            raise WrongState(
                f"rank {found[0]} of {found[1]} in its group", f"a boundary for rank {rank} of {world}"
            )
        self._group, self._dist = group, dist
        self._source = 0 if group is None else dist.get_global_rank(group, 0)
        self._buffer = torch.zeros(3, dtype=torch.int64)

    def broadcast(self, decision: Decision | None) -> Decision | None:
        """Return rank 0's decision on every rank. Raises ChannelClosed once the group has failed."""
        buffer = self._buffer
        if decision is None:
            buffer[0] = _NONE
        else:
            buffer[0] = _UNDO if decision.undo else _COMMIT
            buffer[1], buffer[2] = decision.epoch, int(decision.timeout_s * 1000)
        try:
            self._dist.broadcast(buffer, src=self._source, group=self._group)
        except RuntimeError as error:
            raise ChannelClosed(f"the process group failed, make a new one: {error}") from error
        kind, epoch, timeout_ms = buffer.tolist()
        return None if kind == _NONE else Decision(epoch, kind == _UNDO, timeout_ms / 1000)
