"""What the engine's suites share: engines that take updates, and publishers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.config import EngineConfig, Restarts, Snapshots, Updates
from liveweight.engine.engine import Engine
from liveweight.engine.recovery.restarting_engine import RestartingEngine
from liveweight.engine.serving.rank_processes import RankProcess
from liveweight.observe.bus import Bus
from liveweight.wire.messages.values import KvPolicy
from tests.support.engine.elastic import Gate, launching
from tests.support.engine.engines import forking
from tests.support.processes.fork_server import Zygote


@pytest.fixture
def start(zygote: Zygote, short_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines that take updates and end with the test."""
    with ExitStack() as stack:

        def start(
            model: Path,
            *,
            kv_policy: KvPolicy = "recompute",
            updates: dict[str, Any] | None = None,
            environ: dict[str, str] | None = None,
            **settings: Any,
        ) -> Engine:
            given = Updates(
                address=f"ipc://{short_path}/engine-{len(list(short_path.iterdir()))}.sock",
                secret_file=str(short_path / "secret"),
                kv_policy=kv_policy,
                **(updates or {}),
            )
            config = EngineConfig(model=str(model), threads=1, updates=given, **settings)
            return stack.enter_context(Engine(config, launch=forking(zygote, environ)))

        yield start


@pytest.fixture
def publisher(short_path: Path) -> Iterator[Callable[..., lw.Publisher]]:
    """Publishers, of checkpoint directories and of modules, that close with the test."""
    with ExitStack() as stack:

        def make(engine: Engine | RestartingEngine, source: object, **settings: Any) -> lw.Publisher:
            made = lw.Publisher(
                source,
                engines=[engine.address or ""],
                secret=short_path / "secret",
                directory=short_path / "trainer",
                **settings,
            )
            return stack.enter_context(made)

        yield make


@pytest.fixture
def elastic(zygote: Zygote, short_path: Path) -> Iterator[Callable[..., RestartingEngine]]:
    """Starts engines that keep snapshots and replace their ranks; they end with the test."""
    with ExitStack() as stack:

        def start(
            model: Path,
            *,
            updates: dict[str, Any] | None = None,
            snapshots: dict[str, Any] | None = None,
            restarts: Restarts | None = None,
            gate: Gate | None = None,
            started: Callable[[int, RankProcess], None] = lambda _, __: None,
            bus: Bus | None = None,
            **settings: Any,
        ) -> RestartingEngine:
            address = f"ipc://{short_path}/engine-{len(list(short_path.iterdir()))}.sock"
            config = EngineConfig(
                model=str(model),
                threads=1,
                updates=Updates(address=address, secret_file=str(short_path / "secret"), **(updates or {})),
                snapshots=Snapshots(**{"directory": str(short_path / "snapshots")} | (snapshots or {})),
                restarts=restarts or Restarts(wait_s=0.01),
                **{"tp": 2} | settings,
            )
            launch = launching(zygote, gate, started)
            return stack.enter_context(RestartingEngine(config, launch=launch, bus=bus))

        yield start


@pytest.fixture
def gate(short_path: Path) -> Iterator[Gate]:
    """Where rank 1 of an engine can be held in the middle of a snapshot."""
    made = Gate(short_path / "gate")
    yield made
    made.close()
