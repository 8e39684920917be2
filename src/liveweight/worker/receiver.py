"""The receiver: makes a program that holds tensors a rank of a replica.

Composes a rank (worker/rank), a boundary, and in rank 0 the leader server. The program calls `at_boundary()` between two steps;
whatever version it then holds, it holds whole, and all ranks hold the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from liveweight.devices.kernels import Kernels
from liveweight.errors import ChannelClosed, Torn
from liveweight.observe.bus import Bus
from liveweight.rounds.boundary import Boundary, BroadcastBoundary, DecisionSlot, SingleProcessBoundary
from liveweight.rounds.leader_server import LeaderServer
from liveweight.rounds.one_thread import ExclusiveCalls, exclusive
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.transports.port import Reader
from liveweight.wire.credentials import Secret
from liveweight.worker.commit import Hook
from liveweight.worker.in_place_overwrite import InPlaceSettings
from liveweight.worker.rank import WorkerRank
from liveweight.worker.staging_thread import StagingSettings
from liveweight.worker.targets.target import Target

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RESOLVE_S = 5.0


class RankReceiver:
    """One rank. Every method is for the main thread; while one is in `at_boundary` or `regroup`, another thread's call raises WrongState.

    Rank 0 listens at `address`, where publishers find the replica; the others connect there. A replica of several ranks broadcasts
    decisions over `group`, which must be gloo and is used for nothing else at the same time.
    """

    def __init__(
        self,
        target: Target,
        *,
        address: str,
        secret: Secret,
        kernels: Kernels,
        readers: Mapping[str, Reader],
        live_kernels: Kernels | None = None,
        rank: int = 0,
        world: int = 1,
        group: ProcessGroup | None = None,
        replica: str | None = None,
        serving: Version | None = None,
        hooks: Sequence[Hook] = (),
        settings: StagingSettings | None = None,
        bus: Bus | None = None,
        in_place: InPlaceSettings | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._calls = ExclusiveCalls()
        self._torn: str | None = None
        self.rank, self.world, self.version = rank, world, serving
        bus = bus or Bus()
        deadline = Deadline.after(timeout_s)
        self._boundary: Boundary = (
            SingleProcessBoundary() if world == 1 else BroadcastBoundary(group, rank, world)
        )
        self._slot = DecisionSlot()
        with ExitStack() as stack:
            self._leader: LeaderServer | None = None
            if rank == 0:
                boot = secrets.token_hex(8)
                self._leader = LeaderServer(
                    address=address,
                    secret=secret,
                    replica=replica or address,
                    boot=boot,
                    world=world,
                    bus=bus,
                    decisions=self._slot,
                )
                stack.callback(self._leader.close)
                address = self._leader.address
            self.address = address
            self._worker_rank = WorkerRank(
                target,
                address=address,
                secret=secret,
                kernels=kernels,
                readers=readers,
                live_kernels=live_kernels,
                rank=rank,
                serving=serving,
                hooks=hooks,
                settings=settings or StagingSettings(),
                bus=bus,
                deadline=deadline,
                in_place=in_place,
            )
            stack.callback(self._worker_rank.close)
            self._resources = stack.pop_all()

    @exclusive
    def at_boundary(self, idle_s: float = 0.0) -> Version | None:
        """Between two steps: carry out what was decided, on all ranks at once; returns the version that serves from here on.

        Costs nothing where nothing was decided (it reads one variable; with several ranks, one small CPU broadcast). `idle_s` lets
        an idle program wait here for a decision. If it raises after the broadcast (OutcomeUnknown, or a hook's error on the way
        back), this rank must not serve; called again, it finishes the same boundary without another broadcast.

        In place, it raises Torn on every rank if a commit failed after one of them had begun to write. The ranks must not serve then, but
        go on calling: each call broadcasts, and raises Torn, until a round has brought all of the weights.
        """
        settled = self._worker_rank.resolve(RESOLVE_S)
        if settled is None:
            waiting = None if self._leader is None else self._slot.take(idle_s)
            decision = self._boundary.broadcast(waiting)
            if decision is not None:
                settled = self._worker_rank.carry_out(decision)
        if settled is not None:
            self.version, self._torn = settled.serving, settled.torn
        elif self._worker_rank.failure is not None:
            raise ChannelClosed(
                f"rank {self.rank} cannot take part in rounds any more: {self._worker_rank.failure}"
            )
        if self._torn is not None:
            raise Torn(self._torn)
        return self.version

    @exclusive
    def regroup(self, group: ProcessGroup | None) -> None:
        """Use a new group, after the old one failed. Every rank calls it."""
        self._boundary = BroadcastBoundary(group, self.rank, self.world)

    def close(self) -> None:
        """Leave the replica: threads, channels and mappings end. The weights stay as they are."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
