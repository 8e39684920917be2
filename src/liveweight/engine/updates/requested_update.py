"""Requested updates: an operator names a version, and the engine reads it from its source in a round that the engine coordinates.

The round is the same as a trainer's (rounds/coordinator), against the engine's own leader. One update runs at a time: a second is
refused, naming the first. A read lease keeps the version available at the source while the ranks read (rounds/read_lease).
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
"""How long closing waits for an update that was asked to end; its own waits last seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedVersion:
    """The version that an operator asks for. `version` None: the source's newest; `transfer_mode` None: the engine's setting; `pause` None:
    requests run on; `call` is the id of the HTTP call."""

    call: str
    version: str | int | None = None
    transfer_mode: str | None = None
    verify: bool = True
    kv_policy: KvPolicy | None = None
    pause: PauseMode | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """How long the steps took; of the ranks' own, the slowest. `hold_s`: until the source granted a read lease."""

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
    such as the draft's, that the offer left out. `ranks` is empty if the leader's reply to the commit was lost, and the
    outcome was queried afterwards."""

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
        """`transfer_mode`: the mode if a request names none; None: any."""
        self.source, self._mode = source, transfer_mode
        self._leader, self._secret, self._replica, self._world = leader, secret, replica, world
        self._pauses = pauses
        self._changed = threading.Condition()
        self._running_call: str | None = None
        self._running_replica: WireReplica | None = None
        self._closing = False
        self._cancel = Waker()

    def update(self, request: RequestedVersion) -> UpdateResult:
        """Take the engine to that version. RoundFailed: it serves what it served, and the cause says why; RoundOpen where another
        update runs, VersionNotOffered with what there is, ChannelClosed where no source is."""
        began_s, deadline = time.monotonic(), Deadline.after(request.timeout_s)
        with self._exclusive(request.call):
            try:
                return self._run(request, began_s, deadline)
            except (ChannelClosed, RoundFailed, RoundAborted) as error:
                self._check_not_closing(error)
                raise

    def close(self) -> None:
        """End the running update without waiting for peers that do not answer; refuse others."""
        with self._changed:
            self._closing = True
            if self._running_replica is not None:
                self._running_replica.interrupt()
            self._cancel.wake()
            if self._changed.wait_for(lambda: self._running_call is None, CLOSE_S):
                self._cancel.close()  # else another thread still polls it

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        with self._changed:
            self._check_not_closing()
            if self._running_call is not None:
                raise RoundOpen(self._replica, self._running_call)
            self._running_call = f"{OPERATOR}/{call}"
        try:
            yield
        finally:
            with self._changed:
                self._running_call = self._running_replica = None
                self._changed.notify_all()

    def _check_not_closing(self, cause: Exception | None = None) -> None:
        if self._closing:
            raise EngineStopping("the engine is being stopped") from cause

    def _run(self, request: RequestedVersion, began_s: float, deadline: Deadline) -> UpdateResult:
        with ExitStack() as stack:
            lease = stack.enter_context(self._read_lease(request, deadline))
            hold_s = time.monotonic() - began_s
            _check(request, request.transfer_mode or self._mode, lease.grant)
            replica = WireReplica(self._leader, self._secret)
            stack.callback(replica.close)
            with self._changed:
                self._check_not_closing()
                self._running_replica = replica
            stack.callback(self._pauses.resume_from, request.call)
            pool = stack.enter_context(
                ThreadPoolExecutor(1)
            )  # the coordinator uses no thread of it for one replica
            pause = _Pause(self._pauses, request, deadline, self._check_not_closing)
            progress = ReplicaProgress(replica)
            coordinator = self._coordinator(request, lease, progress, deadline, pool, pause)
            coordinator.run()
            steps = _times(progress, coordinator, hold_s=hold_s, pause_s=pause.took_s, began_s=began_s)
            return self._result(request, lease.grant, progress, steps)

    def _read_lease(self, request: RequestedVersion, deadline: Deadline) -> ReadLease:
        return ReadLease(
            self.source,
            self._secret,
            requester=f"{self._replica}, asked by {OPERATOR}/{request.call}",
            version=None if request.version is None else str(request.version),
            lease_s=deadline.remaining_s() + LEASE_S + MARGIN_S,
            deadline=deadline,
            cancel=self._cancel,
        )

    def _coordinator(
        self,
        request: RequestedVersion,
        lease: ReadLease,
        progress: ReplicaProgress,
        deadline: Deadline,
        pool: ThreadPoolExecutor,
        pause: _Pause,
    ) -> RoundCoordinator:
        grant = lease.grant
        order = m.Open(
            publisher=f"{OPERATOR}/{request.call}",
            version=grant.version,
            structure=grant.structure,
            digests=grant.digests,
            offer=grant.offer,
            verify=request.verify,
            timeout_s=deadline.remaining_s() + LEASE_S + MARGIN_S,
            kv_policy=request.kv_policy,
            host=this_host(),
            pid=os.getpid(),
        )
        return RoundCoordinator(
            replicas=[progress],
            order=order,
            description=m.Describe(structure=grant.structure, manifest=grant.manifest, kept=grant.kept),
            quorum=1,
            lease_s=LEASE_S,
            deadline=deadline,
            pool=pool,
            on_staged=lambda: None,
            on_read=lambda: lease.release(read=True),
            closing=lambda: self._closing,
            poll=lease.check,
            before_vote=pause.begin,
        )

    def _result(
        self,
        request: RequestedVersion,
        grant: ReadLeaseGranted,
        progress: ReplicaProgress,
        steps: UpdateTimes,
    ) -> UpdateResult:
        round_id, committed = progress.round_id, progress.committed
        nothing = tuple(RankTimes(rank=rank) for rank in range(self._world))
        return UpdateResult(
            version=grant.version,
            outcome="unchanged" if progress.unchanged else "committed",
            round=None if round_id is None else f"{round_id.boot}/{round_id.epoch}",
            mode=grant.offer.mode,
            verified=request.verify and not progress.unchanged,
            tensors=len(grant.manifest.tensors),
            kept=progress.kept,
            steps=steps,
            ranks=nothing if committed is None else committed.ranks,
        )


@dataclass(slots=True)
class _Pause:
    """The pause that the request asks for, begun when all ranks are ready, and how long it took until no request ran."""

    pauses: Pauses
    request: RequestedVersion
    deadline: Deadline
    check_continue: Callable[[], None]
    took_s: float = 0.0

    def begin(self) -> None:
        """Pause requests, if the request asks for it."""
        if self.request.pause is not None:
            began_s = time.monotonic()
            self.pauses.pause_for(self.request.call, self.request.pause, self.deadline, self.check_continue)
            self.took_s = time.monotonic() - began_s


def _times(
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


def _check(request: RequestedVersion, transfer_mode: str | None, grant: ReadLeaseGranted) -> None:
    mode, label = grant.offer.mode, grant.version
    if transfer_mode not in (None, mode):
        raise VersionNotOffered(f"{label} over {transfer_mode}", [f"{label} over {mode}"])
    if request.verify and grant.digests is None:
        raise VersionNotOffered(
            f"{label} verified", [f"{label} as a {grant.offer.kind} offer without digests"]
        )
