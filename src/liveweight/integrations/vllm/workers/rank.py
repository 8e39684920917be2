"""A vLLM worker as a rank of a replica: the leader server in worker 0, a WorkerRank in every worker, and the memory that they stage into.

Composes rounds/leader_server and worker/rank. Staging, verifying and voting run in background threads while vLLM generates. The main
thread swaps, in vLLM's `update_weights`, which reaches all workers between the same two steps.
"""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from liveweight.devices.device import CPU
from liveweight.devices.kernels import choose_kernels
from liveweight.errors import WrongState
from liveweight.integrations.vllm.handshake_terms import HandshakeTerms, Verify
from liveweight.integrations.vllm.workers.host_arenas import HostArenas
from liveweight.integrations.vllm.workers.read_back import ModelReadBack, TensorPlace
from liveweight.integrations.vllm.workers.target import Named, VllmTarget, divide
from liveweight.observe.bus import Bus
from liveweight.observe.log import log
from liveweight.rounds.boundary import Decision, DecisionSlot
from liveweight.rounds.leader_server import LeaderServer
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, OptionalGroup, Version
from liveweight.transports.port import Reader
from liveweight.transports.registry import TRANSPORTS
from liveweight.wire.credentials import Secret, socket_directory
from liveweight.wire.default_paths import default_directory
from liveweight.wire.messages import Settled
from liveweight.wire.sockets import still_there, unix_path
from liveweight.worker.rank import WorkerRank
from liveweight.worker.staging_thread import StagingSettings

if TYPE_CHECKING:
    import torch

START = Version(run="start", label="initial")
"""The version that vLLM serves before the first round. Its tensors are in files, and have no digests."""
RESOLVE_S = 5.0
_PAUSE_MS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeat:
    """Which worker this is: its number among all workers and among those of its host, and the unique name of its vLLM."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    vllm: str

    @property
    def host(self) -> int:
        """The number of this host among the replica's hosts."""
        return self.rank // self.local_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a version gets into the worker's model. `load` installs all tensors, `restore` repairs a failed load, `start` yields the tensors
    vLLM was started from, `places` says where tensors lie in the model. `learn` is called with the installed tensors before others are
    staged. `optional`: tensors that an offer may leave out."""

    manifest: Manifest
    load: Callable[[Named], None]
    restore: Callable[[], None]
    start: Callable[[], Named]
    learn: Callable[[Callable[[str], torch.Tensor]], None]
    places: Callable[[], Iterable[TensorPlace]]
    optional: tuple[OptionalGroup, ...] = ()


class VllmRank:
    """One worker's rank. Every method is for the worker's main thread."""

    def __init__(self, seat: WorkerSeat, loading: Loading, terms: HandshakeTerms, secret: Secret) -> None:
        self._seat, self._secret, self._optional = seat, secret, loading.optional
        self._serving: Version | None = START
        self._bus = Bus()
        self._bus.subscribe(log)
        self._kernels = choose_kernels(self._bus, CPU.choose())
        shares = divide(loading.manifest, seat.local_world)
        place = socket_directory(default_directory()) / f"vllm-{seat.vllm}-{seat.host}.fds"
        self._arenas = HostArenas(
            Path(place),
            secret,
            size_bytes=shares.size_bytes,
            first=seat.local_rank == 0,
            deadline=Deadline.after(terms.timeout_s),
        )
        self._target = VllmTarget(
            loading.manifest,
            self._arenas,
            shares,
            local_rank=seat.local_rank,
            load=loading.load,
            restore=loading.restore,
            start=loading.start,
            learn=loading.learn,
            reading=ModelReadBack(loading.manifest, loading.places),
        )
        self._worker_rank: WorkerRank | None = None
        self._address: str | None = None
        self._decided = DecisionSlot()
        self._leader: LeaderServer | None = None
        self._socket: tuple[Path, os.stat_result] | None = None
        self._resources = ExitStack()

    def handshake(self, terms: HandshakeTerms) -> None:
        """Join the leader at the trainer's address; worker 0 starts it, and the leader reports the session. If called again with the same
        address, only resolve a swap in doubt, and take the new trainer's pace."""
        if self._leader is not None:
            self._leader.note_handshake(terms.session)
        if self._worker_rank is not None:
            self._note(self._worker_rank.resolve(RESOLVE_S))
            if terms.address == self._address and self._worker_rank.failure is None and not self._displaced():
                self._worker_rank.pace_bytes_per_s = terms.pace_bytes_per_s
                return
            self._leave()
        deadline = Deadline.after(terms.timeout_s)
        with ExitStack() as stack:
            if self._seat.rank == 0:
                self._leader = self._start_leader(terms)
                stack.callback(self._leader.close)
            worker_rank = self._join_when_ready(terms, deadline)
            stack.callback(worker_rank.close)
            self._resources = stack.pop_all()
        self._worker_rank, self._address = worker_rank, terms.address
        path = unix_path(terms.address)
        self._socket = None if path is None else (path, path.lstat())

    def _displaced(self) -> bool:
        """Whether the joined leader cannot be reached any more: its socket file is gone, or is another process's."""
        return self._socket is not None and not still_there(*self._socket)

    def _join_when_ready(self, terms: HandshakeTerms, deadline: Deadline) -> WorkerRank:
        """Join this vLLM's leader once it listens. Until then a worker of a vLLM that has ended may still listen there."""
        readers = {name: mode.reader(self._secret, self._kernels, CPU) for name, mode in TRANSPORTS.items()}
        while True:
            try:
                return self._join(terms, readers, deadline)
            except WrongState:
                deadline.check(f"worker 0 to listen at {terms.address}")
                select.poll().poll(_PAUSE_MS)

    def _join(self, terms: HandshakeTerms, readers: Mapping[str, Reader], deadline: Deadline) -> WorkerRank:
        return WorkerRank(
            self._target,
            address=terms.address,
            secret=self._secret,
            kernels=self._kernels,
            readers=readers,
            rank=self._seat.rank,
            serving=self._serving,
            hooks=(),
            settings=StagingSettings(pace_bytes_per_s=terms.pace_bytes_per_s),
            bus=self._bus,
            deadline=deadline,
            optional=self._optional,
            met=terms.session,
        )

    def _start_leader(self, terms: HandshakeTerms) -> LeaderServer:
        """Start the leader server. Its decisions come back through vLLM's `update_weights`, called by the trainer that asked for them."""
        leader = LeaderServer(
            address=terms.address,
            secret=self._secret,
            replica=terms.address,
            boot=secrets.token_hex(8),
            world=self._seat.world,
            bus=self._bus,
            decisions=self._decided,
            # The trainer's handshake reached this vLLM: a worker that still listens there has outlived its own vLLM.
            takes_over=True,
        )
        leader.note_handshake(terms.session)
        return leader

    @property
    def pace_bytes_per_s(self) -> float | None:
        """How fast this worker may stage; None is as fast as one thread can."""
        return None if self._worker_rank is None else self._worker_rank.pace_bytes_per_s

    def swap(self, decision: Decision, *, boot: str, verify: Verify) -> None:
        """Install the staged version on all workers or on none, as the leader with that boot id decided. If it raises, this worker must not
        serve until the next `handshake`."""
        if self._worker_rank is None:
            raise WrongState("without a trainer's handshake", "an update")
        if boot != self._worker_rank.boot:
            raise WrongState("a rank of another leader", "an update")
        self._target.reads_back = verify == "installed"
        self._decided.take(0.0)  # worker 0's leader can no longer withdraw the decision
        self._worker_rank.resolve(RESOLVE_S)
        self._note(self._worker_rank.carry_out(decision))

    def _note(self, settled: Settled | None) -> None:
        if settled is not None:
            self._serving = settled.serving

    def _leave(self) -> None:
        self._resources.close()
        self._worker_rank = self._leader = None

    def close(self) -> None:
        """Leave the replica; the weights stay as they are."""
        self._leave()
        self._arenas.close()
