"""The embedded engine as a target: it replaces lost ranks, and trainers publish to it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from liveweight.engine.config import EngineConfig, Restarts, Snapshots, Updates
from liveweight.engine.recovery.restarting_engine import RestartingEngine
from liveweight.engine.serving.rank_processes import RankProcess
from liveweight.errors import LiveWeightError
from liveweight.lab.torture.client_load import Submitting
from liveweight.lab.torture.fault_plan import MENU, Strike
from liveweight.lab.torture.faulted_round import POLL_S, FaultedRounds
from liveweight.lab.torture.fork_server import Forked, ForkServer
from liveweight.lab.torture.replay import PublishedContents
from liveweight.lab.torture.round_moments import RoundMoments
from liveweight.lab.torture.targets.target import CHECK_EVERY, RECOVER_S, StrikeCounts
from liveweight.lab.torture.trainer_main import Publish, PublishingConfig
from liveweight.lab.torture.trainer_process import TrainerProcess
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline

RANKS = 2
STEP_S = 6.0
ROUND_S = 2.0
LEASE_S = 1.0
PACE_S = 0.04
"""The minimum time of staging, so that strikes can hit its middle."""


class EmbeddedTarget:
    """See Target."""

    attributed, menu, check_every = True, MENU, CHECK_EVERY

    def __init__(self, fork_server: ForkServer, directory: Path, versions: PublishedContents) -> None:
        self.counts = StrikeCounts()
        self._fork_server, self._directory, self._versions = fork_server, directory, versions
        self._label = 0
        self._stack, self._events = ExitStack(), RoundMoments(self.counts)
        self._rounds = FaultedRounds(
            self, self.counts, self._events, lasts_s={"RoundOpened": PACE_S}, round_s=ROUND_S, lease_s=LEASE_S
        )
        self._pause = threading.Event()
        self._forked: list[Forked] = []
        self._trainer: TrainerProcess | None = None

    def __enter__(self) -> Self:
        bus = Bus()
        self._stack.enter_context(bus.subscribe(self._events.on_event))
        self._stack.callback(self._events.close)
        self._bus = bus
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._trainer is not None:
            self._trainer.kill()
        self._engine.stop()
        self._stack.close()

    def engine(self) -> Submitting:
        """See Target."""
        return Submitting(self._engine)

    def takes(self, strike: Strike) -> bool:
        """See Target."""
        del strike
        return True

    def processes(self) -> dict[int, str]:
        """See Target."""
        names = {os.getpid(): "the engine", self._fork_server.pid: "the fork server"}
        names |= {pid: f"rank {rank}" for rank, pid in enumerate(self._engine.pids)}
        return names if self._trainer is None else names | {self._trainer.process.pid: "the trainer"}

    def left(self) -> tuple[list[Forked], list[Path]]:
        """See Target."""
        return self._forked, [self._directory / "engine.sock"]

    def strike(self, strike: Strike) -> None:
        """See Target."""
        trainer, self._last = self._ready_trainer(), strike
        self._label += 1
        order = Publish(
            label=self._label,
            content=self._versions.of_label(self._label),
            offer=strike.offer,
            verify=strike.verify,
            timeout_s=self._rounds.timeout_s,
            lease_s=self._rounds.lease_s,
        )
        pid = self._rounds.strike(strike, order, trainer)
        self._until_serving(pid if strike.whom == "rank" and _ends(strike) else None)

    def pid_of(self, strike: Strike) -> int:
        """See FaultedEngine."""
        return self._engine.pids[strike.number % RANKS]

    def send(self, pid: int, number: signal.Signals) -> None:
        """See FaultedEngine."""
        os.kill(pid, number)

    def idle(self) -> bool:
        """See FaultedEngine."""
        return self._serves(None)

    def describe(self) -> str:
        """See FaultedEngine."""
        state = self._engine.status().state
        try:
            updates = self._engine.update_status()
        except LiveWeightError as error:
            return f"{state}; {error.code} {error}"
        return f"{state}; {updates.state}, round {updates.round}, serving {updates.serving}"

    # The engine.

    def _start(self) -> None:
        start = self._versions.directories[0]
        size_bytes = sum(path.stat().st_size for path in start.glob("*.safetensors"))
        address = f"ipc://{self._directory}/engine.sock"
        updates = Updates(
            address=address,
            secret_file=str(self._directory / "secret"),
            pace_bytes_per_s=size_bytes / RANKS / PACE_S,
        )
        self._config = EngineConfig(
            model=str(start),
            tp=RANKS,
            updates=updates,
            kv_bytes=16 << 20,
            snapshots=Snapshots(directory=str(self._directory / "snapshots")),
            restarts=Restarts(limit=1 << 30, attempts=5, wait_s=0.1),
            start_timeout_s=RECOVER_S / 3,
            step_timeout_s=STEP_S,
        )
        self._engine = RestartingEngine(self._config, launch=self._launch, bus=self._bus)

    def _launch(self, rank: int, end: socket.socket) -> RankProcess:
        del rank
        forked = self._fork_server.fork("rank", end)
        self._forked.append(forked)
        return forked

    def _until_serving(self, gone: int | None) -> None:
        """Wait until the engine serves without the lost rank, and no round is open. If it does not, count it as lost, and start another."""
        deadline = Deadline.after(RECOVER_S)
        while not self._serves(gone):
            if self._engine.status().state == "failed" or deadline.remaining_s() == 0.0:
                self.counts.lost += 1
                self.counts.notes.append(f"lost after strike {self._label}: {self._last}; {self.describe()}")
                self._engine.stop()
                self._start()
                return
            self._pause.wait(POLL_S)

    def _serves(self, gone: int | None) -> bool:
        if gone in self._engine.pids or self._engine.status().state != "running":
            return False
        with suppress(LiveWeightError):
            return self._engine.update_status().round is None
        return False

    # The trainer.

    def _ready_trainer(self) -> TrainerProcess:
        if self._trainer is not None and self._trainer.process.poll() is None:
            return self._trainer
        if self._trainer is not None:
            self._trainer.kill()
        config = PublishingConfig(
            checkpoints=tuple(map(str, self._versions.directories)),
            address=str(self._engine.address),
            secret_file=str(self._directory / "secret"),
            directory=str(self._directory / "trainer"),
        )
        self._trainer = TrainerProcess(self._fork_server, "publisher", config, Deadline.after(RECOVER_S))
        self._forked.append(self._trainer.process)
        return self._trainer


def _ends(strike: Strike) -> bool:
    """Whether the struck process does not survive."""
    return strike.kind == "kill" or (strike.kind == "stop" and strike.stop_s is None)
