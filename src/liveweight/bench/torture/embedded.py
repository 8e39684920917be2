"""The embedded engine as a target: ranks that are replaced when they are lost, and trainers that publish."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from liveweight.bench.torture.blows import cut, flip
from liveweight.bench.torture.events import Events
from liveweight.bench.torture.hand import Hand
from liveweight.bench.torture.nursery import Forked, Nursery
from liveweight.bench.torture.replay import Versions
from liveweight.bench.torture.strikes import Strike
from liveweight.bench.torture.target import RECOVER_S, SLACK_S, Tally
from liveweight.bench.torture.trainer import Ended, Publish, Publishing
from liveweight.engine.config import EngineConfig, Restarts, Snapshots, Updates
from liveweight.engine.ranks import Process
from liveweight.engine.restarting import RestartingEngine
from liveweight.errors import DeadlineExceeded, LiveWeightError
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline
from liveweight.trainer.settings import PublisherSettings, last_steps_s

RANKS = 2
STEP_S = 6.0
ROUND_S = 2.0
LEASE_S = 1.0
LOOK_S = 0.005
PACE_S = 0.04
"""How long staging takes at least: so that there is a middle of it."""
STEP_PART_S = 0.004
"""About how long the steps after it take."""


class Embedded:
    """See Target."""

    attributed = True

    def __init__(self, nursery: Nursery, directory: Path, versions: Versions) -> None:
        self.tally = Tally()
        self._nursery, self._directory, self._versions = nursery, directory, versions
        self._label = 0
        self._rounds_s: deque[float] = deque([0.2], maxlen=32)
        self._stack, self._events = ExitStack(), Events(self.tally)
        self._pause = threading.Event()
        self._forked: list[Forked] = []
        self._trainer: Hand | None = None

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

    def engine(self) -> RestartingEngine:
        """See Target."""
        return self._engine

    def takes(self, strike: Strike) -> bool:
        """See Target."""
        del strike
        return True

    def processes(self) -> dict[int, str]:
        """See Target."""
        names = {os.getpid(): "the engine", self._nursery.pid: "the nursery"}
        names |= {pid: f"rank {rank}" for rank, pid in enumerate(self._engine.pids)}
        return names if self._trainer is None else names | {self._trainer.process.pid: "the trainer"}

    def left(self) -> tuple[list[Forked], list[Path]]:
        """See Target."""
        return self._forked, [self._directory / "engine.sock"]

    def strike(self, strike: Strike) -> None:
        """See Target."""
        trainer, self._last = self._standing_trainer(), strike
        self._label += 1
        self._events.begin()
        order = Publish(
            label=self._label,
            content=self._versions.of_label(self._label),
            offer=strike.offer,
            verify=strike.verify,
            timeout_s=max(ROUND_S, 20 * self._typical_s),
            lease_s=max(LEASE_S, 10 * self._typical_s),
        )
        trainer.begin(order)
        ended = self._until_moment(strike, trainer)
        moment = self._events.last
        pid, hit = self._blow(strike, trainer)
        self.tally.note(strike, moment, hit=hit)
        self._settle(strike, order, trainer, ended)
        self._until_serving(pid if strike.whom == "rank" and _ends(strike) else None)

    @property
    def _typical_s(self) -> float:
        return statistics.median(self._rounds_s)

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

    def _launch(self, rank: int, end: socket.socket) -> Process:
        del rank
        forked = self._nursery.fork("rank", end)
        self._forked.append(forked)
        return forked

    def _until_serving(self, gone: int | None) -> None:
        """Wait until it serves, without the rank that is gone, and no round is open. An engine that does not is lost, and another begun."""
        deadline = Deadline.after(RECOVER_S)
        while not self._serves(gone):
            if self._engine.status().state == "failed" or deadline.remaining_s() == 0.0:
                self.tally.lost += 1
                self.tally.notes.append(f"lost after strike {self._label}: {self._last}; {self._said()}")
                self._engine.stop()
                self._start()
                return
            self._pause.wait(LOOK_S)

    def _said(self) -> str:
        """What the engine says of itself."""
        state = self._engine.status().state
        try:
            standing = self._engine.standing()
        except LiveWeightError as error:
            return f"{state}; {error.code} {error}"
        return f"{state}; {standing.state}, round {standing.round}, serving {standing.serving}"

    def _serves(self, gone: int | None) -> bool:
        if gone in self._engine.pids or self._engine.status().state != "running":
            return False
        with suppress(LiveWeightError):
            return self._engine.standing().round is None
        return False

    # The trainer.

    def _standing_trainer(self) -> Hand:
        if self._trainer is not None and self._trainer.process.poll() is None:
            return self._trainer
        if self._trainer is not None:
            self._trainer.kill()
        config = Publishing(
            checkpoints=tuple(map(str, self._versions.directories)),
            address=str(self._engine.address),
            secret_file=str(self._directory / "secret"),
            directory=str(self._directory / "trainer"),
        )
        self._trainer = Hand(self._nursery, "publisher", config, Deadline.after(RECOVER_S))
        self._forked.append(self._trainer.process)
        return self._trainer

    # A strike.

    def _until_moment(self, strike: Strike, trainer: Hand) -> Ended | None:
        """Wait for what the strike waits for, and a part of the time after it; the round's end, if that comes first."""
        deadline = Deadline.after(ROUND_S)
        while not self._events.seen(strike.after) and deadline.remaining_s() > 0:
            ended = trainer.ended(deadline.remaining_s(), [self._events.waker])
            if ended is not None or not trainer.alive:
                return ended
        lasts_s = {"publish": self._typical_s, "RoundOpened": PACE_S}.get(strike.after, STEP_PART_S)
        return trainer.ended(max(0.0, strike.part - 0.25) * lasts_s)  # one in four at once

    def _blow(self, strike: Strike, trainer: Hand) -> tuple[int, bool]:
        """Do it; the process that it was done to, and whether there was anything to strike."""
        pid = trainer.process.pid if strike.whom == "trainer" else self._engine.pids[strike.number % RANKS]
        try:
            match strike.kind:
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "corrupt":
                    return pid, flip(pid, strike.number, spared=trainer.parameters)
                case "cut":
                    return pid, cut(pid, strike.number)
                case "stop":
                    os.kill(pid, signal.SIGSTOP)
                    if strike.stop_s is not None:
                        self._pause.wait(strike.stop_s)
                        os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # it had ended by itself
            return pid, False
        return pid, True

    def _settle(self, strike: Strike, order: Publish, trainer: Hand, ended: Ended | None) -> None:
        """The round's end, in the time that it has. One who never wakes up by itself is woken when the engine has given it up."""
        if strike.kind == "kill" and strike.whom == "trainer":
            trainer.kill()
            self.tally.outcomes["trainer killed"] += 1
            return
        if strike.kind == "stop" and strike.whom == "trainer" and strike.stop_s is None:
            self._until_given_up(order)
            with suppress(ProcessLookupError):
                os.kill(trainer.process.pid, signal.SIGCONT)
        steps_s = last_steps_s(PublisherSettings(lease_s=order.lease_s), 1)
        deadline = Deadline.after(2 * order.timeout_s + steps_s + (strike.stop_s or 0.0) + SLACK_S)
        try:
            while ended is None and trainer.alive:
                ended = trainer.ended(deadline.remaining_s())
                if ended is None and trainer.alive:
                    deadline.check("a trainer's round to end")
        except DeadlineExceeded:
            self._note_late("the trainer's round did not end")
            trainer.kill()
        except LiveWeightError as error:  # the trainer's last word
            self.tally.outcomes[error.code] += 1
        if ended is not None:
            self.tally.outcomes[ended.code or "committed"] += 1
            if ended.code is None:
                self._rounds_s.append(ended.took_s)

    def _until_given_up(self, order: Publish) -> None:
        """Until the engine has ended a round whose trainer stands still: late, if it does not in the time that the round has."""
        deadline = Deadline.after(order.timeout_s + order.lease_s + SLACK_S)
        while not self._serves(None):
            if deadline.remaining_s() == 0.0:
                self._note_late("the engine did not give a stopped trainer's round up")
                return
            self._pause.wait(LOOK_S)

    def _note_late(self, what: str) -> None:
        self.tally.late += 1
        self.tally.notes.append(f"late at strike {self._label}, {self._last}: {what}; {self._said()}")


def _ends(strike: Strike) -> bool:
    """Whether the one who is struck does not live on."""
    return strike.kind == "kill" or (strike.kind == "stop" and strike.stop_s is None)
