"""Requested updates: an operator names a version, and the engine reads it from its source, in a round that it drives itself.

The same round that a trainer drives, against the engine's own leader; only who begins it differs. One at a time: a second is
refused, naming the first. What the source offers is the source's; it is held for as long as the ranks read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from liveweight.engine.serving.pauses import Pauses
from liveweight.engine.status import PauseMode
from liveweight.engine.updates.leader_client import OPERATOR
from liveweight.errors import (
    ChannelClosed,
    EngineStopping,
    RoundAborted,
    RoundFailed,
    RoundOpen,
    VersionNotOffered,
)
from liveweight.rounds.coordinator import MARGIN_S, RoundCoordinator
from liveweight.rounds.read_lease import ReadLease
from liveweight.rounds.replica import WireReplica
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.credentials import Secret
from liveweight.wire.host_identity import this_host
from liveweight.wire.messages.source import ReadLeaseGranted
from liveweight.wire.messages.values import KvPolicy, RankTimes
from liveweight.wire.waker import Waker

LEASE_S = 10.0
CLOSE_S = 30.0
"""How long closing waits for an update that was told to end; its waits are seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedVersion:
    """What an operator asks for. `version` None: the source's newest; `transfer_mode` None: as the engine is set; `pause` None: requests
    run on; `call` is the call's own id."""

    call: str
    version: str | int | None = None
    transfer_mode: str | None = None
    verify: bool = True
    kv_policy: KvPolicy | None = None
    pause: PauseMode | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """How long the steps took; of the ranks' own, the slowest. `hold_s`: until the source had the version ready."""

    hold_s: float
    stage_s: float
    verify_s: float
    pause_s: float
    vote_s: float
    commit_s: float
    stall_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The engine serves the version. `unchanged`: it did before, and nothing was done. `kept` names the optional groups of tensors,
    such as the draft's, that the offer left out. `ranks` is empty where the leader's word on the commit was lost, and the commit was
    learned afterwards."""

    version: Version
    outcome: Literal["committed", "unchanged"]
    round: str | None
    mode: str
    verified: bool
    tensors: int
    kept: tuple[str, ...]
    steps: UpdateTimes
    ranks: tuple[RankTimes, ...]


class RequestedUpdates:
    """For any thread. Ends with `close`."""

    def __init__(
        self,
        source: str,
        *,
        transfer_mode: str | None = None,
        leader: str,
        secret: Secret,
        replica: str,
        world: int,
        pauses: Pauses,
    ) -> None:
        """`transfer_mode`: over which updates come where a wish names none; None: any."""
        self.source, self._mode = source, transfer_mode
        self._leader, self._secret, self._replica, self._world = leader, secret, replica, world
        self._pauses = pauses
        self._changed = threading.Condition()
        self._holder: str | None = None
        self._driven: WireReplica | None = None
        self._closing = False
        self._cancel = Waker()

    def update(self, wish: RequestedVersion) -> UpdateResult:
        """Take the engine to that version. RoundFailed: it serves what it served, and the cause says why; RoundOpen where another
        update runs, VersionNotOffered with what there is, ChannelClosed where no source is."""
        began_s, deadline = time.monotonic(), Deadline.after(wish.timeout_s)
        with self._alone(wish.call):
            try:
                return self._run(wish, began_s, deadline)
            except (ChannelClosed, RoundFailed, RoundAborted) as error:
                self._go_on(error)
                raise

    def close(self) -> None:
        """End the update that runs, without waiting for who does not answer, and take no other."""
        with self._changed:
            self._closing = True
            if self._driven is not None:
                self._driven.interrupt()
            self._cancel.wake()
            if self._changed.wait_for(lambda: self._holder is None, CLOSE_S):
                self._cancel.close()  # else somebody still polls it

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        with self._changed:
            self._go_on()
            if self._holder is not None:
                raise RoundOpen(self._replica, self._holder)
            self._holder = f"{OPERATOR}/{call}"
        try:
            yield
        finally:
            with self._changed:
                self._holder = self._driven = None
                self._changed.notify_all()

    def _go_on(self, cause: Exception | None = None) -> None:
        if self._closing:
            raise EngineStopping("the engine is being stopped") from cause

    def _run(self, wish: RequestedVersion, began_s: float, deadline: Deadline) -> UpdateResult:
        with ExitStack() as stack:
            lease = stack.enter_context(self._hold(wish, deadline))
            hold_s = time.monotonic() - began_s
            _check(wish, wish.transfer_mode or self._mode, lease.held)
            replica = WireReplica(self._leader, self._secret)
            stack.callback(replica.close)
            with self._changed:
                self._go_on()
                self._driven = replica
            stack.callback(self._pauses.resume_from, wish.call)
            pool = stack.enter_context(ThreadPoolExecutor(1))  # of one replica none is used
            pause = _Pause(self._pauses, wish, deadline, self._go_on)
            progress = ReplicaProgress(replica)
            coordinator = self._drive(wish, lease, progress, deadline, pool, pause)
            coordinator.run()
            steps = _steps(progress, coordinator, hold_s=hold_s, pause_s=pause.took_s, began_s=began_s)
            return self._updated(wish, lease.held, progress, steps)

    def _hold(self, wish: RequestedVersion, deadline: Deadline) -> ReadLease:
        return ReadLease(
            self.source,
            self._secret,
            requester=f"{self._replica}, asked by {OPERATOR}/{wish.call}",
            version=None if wish.version is None else str(wish.version),
            lease_s=deadline.remaining_s() + LEASE_S + MARGIN_S,
            deadline=deadline,
            cancel=self._cancel,
        )

    def _drive(
        self,
        wish: RequestedVersion,
        lease: ReadLease,
        progress: ReplicaProgress,
        deadline: Deadline,
        pool: ThreadPoolExecutor,
        pause: _Pause,
    ) -> RoundCoordinator:
        held = lease.held
        order = m.Open(
            publisher=f"{OPERATOR}/{wish.call}",
            version=held.version,
            structure=held.structure,
            digests=held.digests,
            offer=held.offer,
            verify=wish.verify,
            timeout_s=deadline.remaining_s() + LEASE_S + MARGIN_S,
            kv_policy=wish.kv_policy,
            host=this_host(),
            pid=os.getpid(),
        )
        return RoundCoordinator(
            parts=[progress],
            order=order,
            manifest=held.manifest,
            quorum=1,
            lease_s=LEASE_S,
            deadline=deadline,
            pool=pool,
            on_staged=lambda: None,
            on_read=lease.release,
            closing=lambda: self._closing,
            poll=lease.check,
            before_vote=pause.begin,
        )

    def _updated(
        self, wish: RequestedVersion, held: ReadLeaseGranted, progress: ReplicaProgress, steps: UpdateTimes
    ) -> UpdateResult:
        round_id, committed = progress.round_id, progress.committed
        nothing = tuple(RankTimes(rank=rank) for rank in range(self._world))
        return UpdateResult(
            version=held.version,
            outcome="unchanged" if progress.unchanged else "committed",
            round=None if round_id is None else f"{round_id.boot}/{round_id.epoch}",
            mode=held.offer.mode,
            verified=wish.verify and not progress.unchanged,
            tensors=len(held.manifest.tensors),
            kept=progress.kept,
            steps=steps,
            ranks=nothing if committed is None else committed.ranks,
        )


@dataclass(slots=True)
class _Pause:
    """The pause that was asked for, begun when all ranks are ready; and how long it took until requests stood still."""

    pauses: Pauses
    wish: RequestedVersion
    deadline: Deadline
    go_on: Callable[[], None]
    took_s: float = 0.0

    def begin(self) -> None:
        """Let requests stand still, if that was asked for."""
        if self.wish.pause is not None:
            began_s = time.monotonic()
            self.pauses.pause_for(self.wish.call, self.wish.pause, self.deadline, self.go_on)
            self.took_s = time.monotonic() - began_s


def _steps(
    progress: ReplicaProgress, coordinator: RoundCoordinator, *, hold_s: float, pause_s: float, began_s: float
) -> UpdateTimes:
    report = progress.report()
    return UpdateTimes(
        hold_s=hold_s,
        stage_s=report.stage_s,
        verify_s=report.verify_s,
        pause_s=pause_s,
        vote_s=coordinator.vote_s,
        commit_s=coordinator.commit_s,
        stall_s=report.stall_s,
        total_s=time.monotonic() - began_s,
    )


def _check(wish: RequestedVersion, transfer_mode: str | None, held: ReadLeaseGranted) -> None:
    mode, label = held.offer.mode, held.version
    if transfer_mode not in (None, mode):
        raise VersionNotOffered(f"{label} over {transfer_mode}", [f"{label} over {mode}"])
    if wish.verify and held.digests is None:
        raise VersionNotOffered(
            f"{label} verified", [f"{label} as a {held.offer.kind} offer without digests"]
        )
