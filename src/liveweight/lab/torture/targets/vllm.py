"""A real vLLM server as a target. A killed server is restarted with its first weights, and the next round updates it."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from liveweight.errors import LiveWeightError
from liveweight.integrations.vllm.client.replica import GRACE_S
from liveweight.integrations.vllm.server_process import VllmLaunching
from liveweight.lab.torture.fault_plan import Strike, StrikeMenu
from liveweight.lab.torture.faulted_round import FaultedRounds
from liveweight.lab.torture.fork_server import Forked, ForkServer
from liveweight.lab.torture.replay import PublishedContents
from liveweight.lab.torture.round_moments import RoundMoments
from liveweight.lab.torture.targets.target import RECOVER_S, StrikeCounts
from liveweight.lab.torture.targets.vllm_server import TorturedVllmServer
from liveweight.lab.torture.trainer_main import Publish, PublishingConfig
from liveweight.lab.torture.trainer_process import TrainerProcess
from liveweight.observe.events import OfferKind
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import load_or_create_secret

ROUND_S, LEASE_S, HEAL_S = 4.0, 2.0, 60.0
ANSWER_S = 5.0
OFFERS: tuple[OfferKind, ...] = ("frozen", "live", "ring")
PACE_S = 0.1
"""The minimum time of staging, so that strikes can hit its middle."""
COMMIT_S = 0.25
"""About how long vLLM is paused for a commit."""
MENU = StrikeMenu(
    kinds=(
        ("kill", "trainer", 6),
        ("stop", "trainer", 4),
        ("corrupt", "trainer", 4),
        ("cut", "trainer", 5),
        ("kill", "server", 3),
        ("stop", "server", 3),
    ),
    forever=0.4,
)


class VllmTortureTarget:
    """See Target."""

    attributed, menu, check_every = True, MENU, 3

    def __init__(
        self, fork_server: ForkServer, directory: Path, versions: PublishedContents, launching: VllmLaunching
    ) -> None:
        self.counts = StrikeCounts()
        self._fork_server, self._directory, self._versions = fork_server, directory, versions
        self._label = 0
        self._stack, self._events = ExitStack(), RoundMoments(self.counts)
        self._server = TorturedVllmServer(launching, directory, versions, lambda: self._label)
        self._rounds = FaultedRounds(
            self,
            self.counts,
            self._events,
            lasts_s={"RoundOpened": PACE_S, "VoteCast": COMMIT_S},
            round_s=ROUND_S,
            lease_s=LEASE_S,
            grace_s=2 * GRACE_S,
        )
        self._offers = itertools.cycle(OFFERS)
        self._trainers: list[Forked] = []
        self._trainer: TrainerProcess | None = None
        self._first_process_only = False
        self._used: set[OfferKind] = set()
        """The kinds of offers that this trainer has made."""
        self._taken: set[OfferKind] = set()
        """The kinds of offers of this trainer that this server has taken in rounds without a strike."""

    def __enter__(self) -> Self:
        self._stack.callback(self._events.close)
        secret = load_or_create_secret(self._directory / "secret")
        self._leader = WireReplica(self._address, secret)
        self._stack.callback(self._leader.close)
        self._stack.callback(self._server.end)
        with ExitStack() as failing:
            failing.callback(self._stack.close)
            self._start()
            self._heal()
            self.idle()  # open the connection now, so that it does not count as a leak
            failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._trainer is not None:
            self._trainer.kill()
        self._stack.close()

    @property
    def _address(self) -> str:
        return f"ipc://{self._directory}/vllm.sock"

    def engine(self) -> TorturedVllmServer:
        """See Target."""
        return self._server

    def takes(self, strike: Strike) -> bool:
        """See Target. No round can recover a server that is stopped forever."""
        return strike.whom == "trainer" or strike.kind == "kill" or strike.stop_s is not None

    def processes(self) -> dict[int, str]:
        """See Target. Includes trainer and server only after offers of every kind, since they keep resources for each kind."""
        names = {os.getpid(): "the torture", self._fork_server.pid: "the fork server"}
        if self._taken == set(OFFERS):
            names |= self._server.processes()
        if self._trainer is not None and self._used == set(OFFERS):
            names[self._trainer.process.pid] = "the trainer"
        return names

    def left(self) -> tuple[list[Forked], list[Path]]:
        """See Target."""
        return self._trainers + self._server.all_processes, []

    def strike(self, strike: Strike) -> None:
        """See Target. The next round is not struck, and must commit."""
        try:
            trainer = self._ready_trainer()
        except LiveWeightError as error:
            self._lose(f"no trainer could connect: {error}")
            trainer = self._ready_trainer()
        order = self._order(strike, self._rounds.timeout_s, self._rounds.lease_s)
        self._rounds.strike(strike, order, trainer)
        if strike.whom == "server" and strike.kind == "kill":
            self.counts.restarts += 1
            self._start()
        self._heal()
        self._server.kill_orphans()

    def _order(self, strike: Strike | None, timeout_s: float, lease_s: float) -> Publish:
        self._label += 1
        offer = next(self._offers) if strike is None else strike.offer
        self._used.add(offer)
        return Publish(
            label=self._label,
            content=self._versions.of_label(self._label),
            offer=offer,
            verify=strike is None or strike.verify,
            timeout_s=timeout_s,
            lease_s=lease_s,
        )

    # Strikes: implements FaultedEngine.

    def pid_of(self, strike: Strike) -> int:
        """See FaultedEngine. Every other killed server leaves its workers running until its successor has committed a round."""
        self._first_process_only = strike.number % 2 == 1
        return self._server.pid

    def send(self, pid: int, number: signal.Signals) -> None:
        """See FaultedEngine. Also signals the server's children, unless only its first process is to be killed."""
        if number != signal.SIGKILL:
            os.killpg(pid, number)
        elif self._first_process_only:
            self._server.kill_first_process()
        else:
            self._server.end(number)

    def idle(self) -> bool:
        """See FaultedEngine."""
        with suppress(LiveWeightError):
            return self._leader.replica_state(Deadline.after(ANSWER_S)).round is None
        return False

    def describe(self) -> str:
        """See FaultedEngine."""
        try:
            state = self._leader.replica_state(Deadline.after(ANSWER_S))
        except LiveWeightError as error:
            return f"{error.code} {error}"
        return f"{state.state}, round {state.round}, serving {state.serving}"

    # Recovery.

    def _heal(self) -> None:
        """Run rounds without a strike until one commits; the server is lost if none does in time."""
        deadline = Deadline.after(RECOVER_S)
        while (code := self._round_without_strike()) is not None:
            self.counts.outcomes[f"without a strike: {code}"] += 1
            if deadline.over or not self._server.alive:
                self._lose(f"a round without a strike failed: {code}")
                return

    def _round_without_strike(self) -> str | None:
        try:
            trainer = self._ready_trainer()
        except LiveWeightError as error:
            return error.code
        order = self._order(None, HEAL_S, HEAL_S / 2)
        code = self._rounds.without_strike(order, trainer)
        if code is None:
            self._taken.add(order.offer)
        return code

    def _start(self) -> None:
        self._taken.clear()
        self._server.start()

    def _lose(self, why: str) -> None:
        """Count the server as lost, and start another."""
        self.counts.lost += 1
        self.counts.notes.append(f"lost after round {self._label}: {why}; {self.describe()}")
        self._server.end(signal.SIGKILL)
        self._start()

    def _ready_trainer(self) -> TrainerProcess:
        if self._trainer is not None and self._trainer.alive and self._trainer.process.poll() is None:
            return self._trainer
        if self._trainer is not None:
            self._trainer.kill()
        contents = self._versions.directories
        size_bytes = sum(path.stat().st_size for path in contents[0].glob("*.safetensors"))
        config = PublishingConfig(
            checkpoints=tuple(map(str, contents)),
            address=self._address,
            secret_file=str(self._directory / "secret"),
            directory=str(self._directory / "trainer"),
            vllm_url=self._server.url,
            pace_bytes_per_s=size_bytes / PACE_S,
        )
        self._used.clear()
        self._taken.clear()
        self._trainer = TrainerProcess(
            self._fork_server, "publisher", config, Deadline.after(RECOVER_S), self._events.reached
        )
        self._trainers.append(self._trainer.process)
        return self._trainer
