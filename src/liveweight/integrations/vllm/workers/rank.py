"""A vLLM worker as a rank of a replica: the leader in worker 0, a member in every worker, and the memory that they stage into.

Composes worker/'s parts. Staging, verifying and voting run in background threads while vLLM generates; the swap is the main thread's,
in vLLM's `update_weights`, which reaches all workers between the same two steps.
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
"""What vLLM serves before the first round. Its content is in files, and nobody has digested them."""
RESOLVE_S = 5.0
_PAUSE_MS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeat:
    """Which worker this is: its number among all, and among those of its host, and of which vLLM: no two have that name."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    vllm: str

    @property
    def host(self) -> int:
        """The number of its host among the replica's."""
        return self.rank // self.local_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a version gets into the worker's model: all its tensors, what puts a failed attempt right, what it was started from, and where
    tensors lie then. `learn` is told which are installed, before others are staged. `optional`: those that an offer may leave out."""

    manifest: Manifest
    load: Callable[[Named], None]
    restore: Callable[[], None]
    start: Callable[[], Named]
    learn: Callable[[Callable[[str], torch.Tensor]], None]
    places: Callable[[], Iterable[TensorPlace]]
    optional: tuple[OptionalGroup, ...] = ()


class VllmRank:
    """One worker's part. Every method is for its main thread."""

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
        self._member: WorkerRank | None = None
        self._address: str | None = None
        self._decided = DecisionSlot()
        self._leader: LeaderServer | None = None
        self._socket: tuple[Path, os.stat_result] | None = None
        self._resources = ExitStack()

    def meet(self, terms: HandshakeTerms) -> None:
        """Be reached at the trainer's address, by a leader that says by which meeting. Asked again, with the same address, it only ends
        what a swap left in doubt, and goes by the new trainer's wishes."""
        if self._leader is not None:
            self._leader.met(terms.session)
        if self._member is not None:
            self._note(self._member.resolve(RESOLVE_S))
            if terms.address == self._address and self._member.failure is None and not self._displaced():
                self._member.pace_bytes_per_s = terms.pace_bytes_per_s
                return
            self._leave()
        deadline = Deadline.after(terms.timeout_s)
        with ExitStack() as stack:
            if self._seat.rank == 0:
                self._leader = self._lead(terms)
                stack.callback(self._leader.close)
            member = self._joined(terms, deadline)
            stack.callback(member.close)
            self._resources = stack.pop_all()
        self._member, self._address = member, terms.address
        path = unix_path(terms.address)
        self._socket = None if path is None else (path, path.lstat())

    def _displaced(self) -> bool:
        """Whether nobody new reaches the leader that it joined: its socket is gone, or another's lies there."""
        return self._socket is not None and not still_there(*self._socket)

    def _joined(self, terms: HandshakeTerms, deadline: Deadline) -> WorkerRank:
        """Joined to this vLLM's leader, once that listens: until then the worker of another one may, which has ended."""
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

    def _lead(self, terms: HandshakeTerms) -> LeaderServer:
        """What it decides comes back through vLLM's `update_weights`, whose caller has asked for the decision."""
        leader = LeaderServer(
            address=terms.address,
            secret=self._secret,
            replica=terms.address,
            boot=secrets.token_hex(8),
            world=self._seat.world,
            bus=self._bus,
            decisions=self._decided,
            # The trainer met this vLLM: a worker that listens there is one that outlived its own.
            takes_over=True,
        )
        leader.met(terms.session)
        return leader

    @property
    def pace_bytes_per_s(self) -> float | None:
        """What staging may take of this worker."""
        return None if self._member is None else self._member.pace_bytes_per_s

    def swap(self, decision: Decision, *, boot: str, verify: Verify) -> None:
        """Install what is staged, on all workers or on none, as the leader with that boot id decided. If it raises, this worker must not
        serve; `meet` takes it up again."""
        if self._member is None:
            raise WrongState("not met by a trainer", "an update")
        if boot != self._member.boot:
            raise WrongState("a rank of another leader", "an update")
        self._target.reads_back = verify == "installed"
        self._decided.take(0.0)  # worker 0's leader learns that it can not be withdrawn any more
        self._member.resolve(RESOLVE_S)
        self._note(self._member.carry_out(decision))

    def _note(self, settled: Settled | None) -> None:
        if settled is not None:
            self._serving = settled.serving

    def _leave(self) -> None:
        self._resources.close()
        self._member = self._leader = None

    def close(self) -> None:
        """Leave the replica; the weights stay as they are."""
        self._leave()
        self._arenas.close()
