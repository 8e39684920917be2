"""Three engines of two ranks that serve clients, and the trainer that publishes to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.observe.bus import Bus
from tests.support.engine.engines import WITHIN_S, Logits, Models
from tests.support.engine.versions import Clients, mixtures
from tests.support.processes.cluster import Cluster, Program
from tests.support.processes.fork_server import Zygote
from tests.support.processes.rank_consoles import RankConsoles
from tests.support.programs.engine_rank_program import HOLD

NAMES, WORLD, SEEDS = "abc", 2, 4


class FleetEngine:
    """One engine of the fleet, its ranks' consoles, and the clients that ask it."""

    def __init__(self, fleet: FleetScene, name: str) -> None:
        self.name, self._fleet = name, fleet
        self.address = fleet.cluster.address(name)
        place = fleet.cluster.directory / f"ranks-{name}"
        place.mkdir()
        self.consoles = RankConsoles(place, WORLD)
        self.asked: list[Clients] = []
        self.engine: Engine

    def start(self, **settings: Any) -> None:
        """Start the engine, or the one that takes its place."""
        updates = Updates(address=self.address, secret_file=str(self._fleet.cluster.secret))
        config = EngineConfig(
            model=str(self._fleet.directories[0]),
            threads=1,
            tp=WORLD,
            updates=updates,
            kv_bytes=8 << 20,
            step_timeout_s=WITHIN_S,
            hooks=(HOLD,),
            **settings,
        )
        launch = self.consoles.forking(self._fleet.zygote)
        self.engine = self._fleet.stack.enter_context(Engine(config, launch=launch, bus=Bus()))

    @property
    def label(self) -> object:
        """What it serves, as its leader reports."""
        serving = self.engine.update_status().serving
        return None if serving is None else serving.label

    def clients(self) -> Clients:
        """Requests that go on all the time; what they get is judged at the end."""
        asking = Clients(self.engine, 1, 40)
        self.asked.append(asking)
        return asking


class FleetScene:
    """The engines start on the checkpoint with seed 0. `publish` gives every version a name of its own; its content is a seed's."""

    def __init__(
        self, cluster: Cluster, zygote: Zygote, models: Models, stack: ExitStack, **trainer: Any
    ) -> None:
        self.cluster, self.zygote, self.stack = cluster, zygote, stack
        self.directories = [models.directory(seed=seed) for seed in range(SEEDS)]
        self.seeds: dict[str, int] = {"initial": 0}
        self.engines = [FleetEngine(self, name) for name in NAMES]
        for engine in self.engines:
            stack.callback(engine.consoles.close)
        for engine in self.engines:
            engine.start()
        self.trainer = self.start_trainer(**trainer)

    def start_trainer(self, **options: Any) -> Program:
        """Start a trainer, or the one that takes its place."""
        checkpoints = [str(path) for path in self.directories]
        return self.cluster.trainer(NAMES, checkpoints=checkpoints, **options)

    def begin(self, name: str, seed: int) -> int:
        """Begin to publish."""
        self.seeds[name] = seed
        return self.trainer.begin("publish", label=seed, name=name)

    def publish(self, name: str, seed: int) -> dict[str, Any]:
        """Publish; returns the result."""
        return self.trainer.end(self.begin(name, seed))

    @property
    def labels(self) -> list[object]:
        """What the engines serve."""
        return [engine.label for engine in self.engines]

    @contextmanager
    def load(self, *engines: FleetEngine) -> Iterator[None]:
        """Requests to all engines, or these, meanwhile."""
        with ExitStack() as stack:
            for engine in engines or self.engines:
                stack.enter_context(engine.clients())
            yield

    def wrong(self, logits: Callable[[Path], Logits]) -> Sequence[str]:
        """Tokens that clients got and that their own version would not have drawn."""
        asked = [pair for engine in self.engines for clients in engine.asked for pair in clients.answers]
        assert asked
        return mixtures(
            asked, lambda weights: logits(self.directories[self.seeds[weights.partition("@")[0]]])
        )


@contextmanager
def fleet_scene(cluster: Cluster, zygote: Zygote, models: Models, **options: Any) -> Iterator[FleetScene]:
    """A scene that ends with the test."""
    with ExitStack() as stack:
        yield FleetScene(cluster, zygote, models, stack, **options)
