"""An engine of two ranks that serves clients, its trainer, and the moments of a round at which a test can hold them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, RoundOpened
from tests.support.engine.engines import Models
from tests.support.engine.versions import Clients
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.fork_server import Zygote
from tests.support.processes.rank_consoles import RankConsoles
from tests.support.programs.conversation import ANSWER_S, Conversation
from tests.support.programs.engine_rank_program import HOLD

Moment = Literal["open", "staging", "overwriting", "verifying", "voting", "committing"]
MOMENTS: tuple[Moment, ...] = ("open", "staging", "verifying", "voting", "committing")
LATEST, WORLD, STEP_S = 4, 2, 8.0
CHUNK_BYTES = 16384
"""Small, so that an overwriting in place has a middle."""
Got = TypeVar("Got")


class OpenHolder:
    """Holds the engine's leader where it has opened a round and notified nobody yet."""

    def __init__(self) -> None:
        self._wanted, self._held, self._go = threading.Event(), threading.Event(), threading.Event()

    def on_event(self, event: AnyEvent) -> None:
        """Called by the bus."""
        if isinstance(event, RoundOpened) and self._wanted.is_set():
            self._wanted.clear()
            self._held.set()
            self._go.wait(ANSWER_S)
            self._go.clear()

    def hold(self) -> None:
        """At the next round."""
        self._wanted.set()

    def held(self) -> None:
        """Wait until it holds."""
        assert self._held.wait(ANSWER_S)

    def go(self) -> None:
        """Let it go on."""
        self._go.set()


class ConsoleHolder:
    """Holds a program that has a console."""

    def __init__(self, program: Conversation, event: str) -> None:
        self._program, self._event = program, event

    def hold(self) -> None:
        """At the next round."""
        self._program.ask("hold", event=self._event)

    def held(self) -> None:
        """Wait until it holds."""
        self._program.held(self._event)

    def go(self) -> None:
        """Let it go on."""
        self._program.ask("go")


class Scene:
    """One engine, one trainer. Version n is the checkpoint with seed n; the engine starts on 0, and version 1 is published."""

    def __init__(
        self,
        cluster: Cluster,
        zygote: Zygote,
        models: Models,
        stack: ExitStack,
        *,
        apart: bool = False,
        shadow: Literal["device", "none"] = "device",
        step_s: float = STEP_S,
        **trainer: Any,
    ) -> None:
        """`apart`: the engine has a process of its own, which can be killed. A rank that is stopped longer than `step_s` is lost."""
        self._shadow, self._step_s = shadow, step_s
        self.directories = [models.directory(seed=seed) for seed in range(LATEST)]
        self._cluster, self._stack = cluster, stack
        self._zygote, self._consoles = zygote, RankConsoles(cluster.directory, WORLD)
        stack.callback(self._consoles.close)
        self._at_open = OpenHolder()
        self._pool = stack.enter_context(ThreadPoolExecutor(2))
        self.program: Program | None = None
        if apart:
            self._start_program()
        else:
            self.start_engine()
        self.trainer = self.start_trainer(**trainer)
        assert "error" not in self.trainer.ask("publish", label=1)

    def start_engine(self) -> None:
        """Start the engine, or the one that takes its place."""
        bus = Bus()
        self._stack.enter_context(bus.subscribe(self._at_open.on_event))
        launch = self._consoles.forking(self._zygote)
        self.program = None
        self.engine = self._stack.enter_context(Engine(self._config, launch=launch, bus=bus))

    def _start_program(self) -> None:
        self.program = self._cluster.engine(self._config, self._consoles.paths)
        self.pids = [self._consoles.accept(rank) for rank in range(WORLD)]
        self.program.expect("ready")

    @property
    def _config(self) -> EngineConfig:
        updates = Updates(
            address=self._cluster.address(),
            secret_file=str(self._cluster.secret),
            shadow=self._shadow,
            chunk_bytes=CHUNK_BYTES,
        )
        model = str(self.directories[0])
        return EngineConfig(
            model=model, threads=1, tp=WORLD, updates=updates, step_timeout_s=self._step_s, hooks=(HOLD,)
        )

    def start_trainer(self, **options: Any) -> Program:
        """Start another trainer of the same checkpoints."""
        return self._cluster.trainer(checkpoints=[str(path) for path in self.directories], **options)

    @property
    def rank(self) -> Conversation:
        """The rank that things happen to."""
        return self._consoles.of[1]

    def clients(self) -> Clients:
        """Requests that go on all the time."""
        return Clients(self.engine, 3, 60)

    @contextmanager
    def held_at(self, moment: Moment, label: int) -> Iterator[Held]:
        """Publish that version, and hold at that moment of its round; let go at the end, if the test did not."""
        holder = self._holder(moment)
        holder.hold()
        call = self.trainer.begin("publish", label=label)
        held = Held(
            holder, call, self._pool, ConsoleHolder(self.rank, "StagingBegan") if moment == "open" else None
        )
        holder.held()
        try:
            yield held
        finally:
            held.go()

    def _holder(self, moment: Moment) -> OpenHolder | ConsoleHolder:
        match moment:
            case "open" if self.program is not None:
                return ConsoleHolder(self.program, "RoundOpened")
            case "open":
                return self._at_open
            case "staging":
                return ConsoleHolder(self.rank, "StagingBegan")
            case "overwriting":
                return ConsoleHolder(self.rank, "OverwritingBegan")
            case "verifying":
                return ConsoleHolder(self.rank, "RankStaged")
            case "voting":
                return ConsoleHolder(self.trainer, "Voting")
            case "committing":
                return ConsoleHolder(self.rank, "Hook")


class Held:
    """A round that is held. `call` is the trainer's publish; `next_holder` holds the round in place of a leader that must answer."""

    def __init__(
        self,
        holder: OpenHolder | ConsoleHolder,
        call: int,
        pool: ThreadPoolExecutor,
        next_holder: ConsoleHolder | None,
    ) -> None:
        self._holder, self._pool, self._next, self.call = holder, pool, next_holder, call
        self._holds = True

    def go(self) -> None:
        """Let it go on."""
        if self._holds:
            self._holds = False
            self._holder.go()

    def gone(self) -> None:
        """The holding process is gone."""
        self._holds = False

    def meanwhile(self, act: Callable[[], Got]) -> Got:
        """Do this while the round is held."""
        doing: Future[Got] = self._pool.submit(act)
        if self._next is not None:
            self._next.hold()
            self._holder.go()
            self._next.held()
            self._holder, self._next = self._next, None
        return doing.result(ANSWER_S)


@contextmanager
def scene(cluster: Cluster, zygote: Zygote, models: Models, **options: Any) -> Iterator[Scene]:
    """A scene that ends with the test."""
    with ExitStack() as stack:
        yield Scene(cluster, zygote, models, stack, **options)


def label_of(weights: str) -> int:
    """The version that tokens call so."""
    label = weights.partition("@")[0]
    return 0 if label == "initial" else int(label)


def directory_of(scene: Scene, weights: str) -> Path:
    """The checkpoint that has them."""
    return scene.directories[label_of(weights)]
