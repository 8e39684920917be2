"""Live updates in the engine: rounds that a publisher drives while requests run. Real ranks, real rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.config import EngineConfig, KvPolicy, Updates
from liveweight.engine.engine import Engine
from tests.support.engines import Arch, Models, answers, ask, forking, greedy
from tests.support.zygote import Zygote

Start = Callable[..., Engine]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [300, 20, 7, 7, 7, 100], list(range(40, 75))]


@pytest.fixture
def start(zygote: Zygote, short_path: Path) -> Iterator[Start]:
    """Starts engines that take updates and end with the test."""
    with ExitStack() as stack:

        def start(model: Path, *, kv_policy: KvPolicy = "recompute", **settings: Any) -> Engine:
            updates = Updates(
                address=f"ipc://{short_path}/engine-{len(list(short_path.iterdir()))}.sock",
                secret_file=str(short_path / "secret"),
                kv_policy=kv_policy,
            )
            config = EngineConfig(model=str(model), threads=1, updates=updates, **settings)
            return stack.enter_context(Engine(config, launch=forking(zygote)))

        yield start


@pytest.fixture
def publisher(short_path: Path) -> Iterator[Callable[[Engine, Path], lw.Publisher]]:
    """Publishers of checkpoint directories that close with the test."""
    with ExitStack() as stack:

        def make(engine: Engine, source: Path, **settings: Any) -> lw.Publisher:
            made = lw.Publisher(
                source,
                engines=[engine.address or ""],
                secret=short_path / "secret",
                directory=short_path / "trainer",
                **settings,
            )
            return stack.enter_context(made)

        yield make


def tokens_of(engine: Engine, count: int = 24) -> list[list[int]]:
    return [answer.ids for answer in answers(engine, PROMPTS, greedy(count))]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("arch", "mtp"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)])
def test_after_a_round_the_engine_answers_as_one_started_on_the_new_weights(
    start: Start, publisher: Any, models: Models, arch: Arch, mtp: bool, tp: int
) -> None:
    old, new = models.directory(arch, mtp=mtp), models.directory(arch, mtp=mtp, seed=1)
    engine = start(old, tp=tp)
    before = tokens_of(engine)
    with_new = publisher(engine, new)
    report = with_new.publish("new")
    assert tokens_of(engine) == tokens_of(start(new, tp=tp)) != before
    assert engine.status().weights == f"new@{report.version.digest}"
    with_new.undo()
    assert tokens_of(engine) == before
    assert engine.status().weights == "initial"
