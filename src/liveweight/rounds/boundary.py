"""The boundary: how the ranks of a replica come to the same step, and the slot that a decision waits in until they do.

A port with two implementations: one process alone, and an SPMD program whose ranks broadcast rank 0's decision as one CPU tensor over
a gloo group that was made and checked once. A collective that failed means a new group; it is never tried again on the old one.
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
    """What the scheduler decided, for all ranks to carry out at one step: swap shadow and live weights, or overwrite these.

    `kv_policy` is for programs that keep requests; ranks have no use for it.
    """

    epoch: int
    undo: bool
    timeout_s: float
    kv_policy: KvPolicy | None = None


class DecisionSink(Protocol):
    """Where a leader leaves what was decided, from its own thread. At most one waits at a time."""

    def put(self, round_id: RoundId, decision: Decision) -> None:
        """Let the next boundary carry it out."""

    def withdraw(self, round_id: RoundId) -> bool:
        """Take it back, if it still waits; whether it did."""


class DecisionSlot:
    """Where the leader puts a decision and rank 0's main thread takes it. At most one waits at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: tuple[RoundId, Decision] | None = None

    def put(self, round_id: RoundId, decision: Decision) -> None:
        """Let the next boundary carry it out. Called from the leader's thread."""
        with self._changed:
            self._waiting = (round_id, decision)
            self._changed.notify_all()

    def withdraw(self, round_id: RoundId) -> bool:
        """Take it back, if it still waits; whether it did."""
        with self._changed:
            waits = self._waiting is not None and self._waiting[0] == round_id
            if waits:
                self._waiting = None
            return waits

    def take(self, idle_s: float) -> Decision | None:
        """The decision that waits; with `idle_s`, one that comes within that time. Called from rank 0's main thread."""
        if self._waiting is None and idle_s <= 0:
            return None  # the normal state: no lock, no wait
        with self._changed:
            if self._waiting is None:
                self._changed.wait(idle_s)
            waiting, self._waiting = self._waiting, None
            return None if waiting is None else waiting[1]


class Boundary(Protocol):
    """Called by every rank's main thread, at the same step of the program."""

    def meet(self, decision: Decision | None) -> Decision | None:
        """Rank 0 brings the decision or None; every rank returns with rank 0's."""


class SingleProcessBoundary:
    """A replica of one process: nobody to meet."""

    def meet(self, decision: Decision | None) -> Decision | None:
        """What was brought."""
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
                f"rank {found[0]} of {found[1]} in its group", f"meeting as rank {rank} of {world}"
            )
        self._group, self._dist = group, dist
        self._source = 0 if group is None else dist.get_global_rank(group, 0)
        self._word = torch.zeros(3, dtype=torch.int64)

    def meet(self, decision: Decision | None) -> Decision | None:
        """Rank 0's decision, on every rank; ChannelClosed once the group has failed."""
        word = self._word
        if decision is None:
            word[0] = _NONE
        else:
            word[0] = _UNDO if decision.undo else _COMMIT
            word[1], word[2] = decision.epoch, int(decision.timeout_s * 1000)
        try:
            self._dist.broadcast(word, src=self._source, group=self._group)
        except RuntimeError as error:
            raise ChannelClosed(f"the process group failed, make a new one: {error}") from error
        kind, epoch, timeout_ms = word.tolist()
        return None if kind == _NONE else Decision(epoch, kind == _UNDO, timeout_ms / 1000)
