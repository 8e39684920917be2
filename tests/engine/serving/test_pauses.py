"""Pauses of an operator and of a round, on a real engine: whose they are, and when requests go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.serving.pauses import Pauses
from liveweight.errors import DeadlineExceeded, EngineStopping
from liveweight.spec.deadline import Deadline
from tests.support.engine.engines import WITHIN_S, Models, ask, forking, greedy
from tests.support.processes.fork_server import Zygote

CALL = "call"


@pytest.fixture
def engine(zygote: Zygote, models: Models) -> Iterator[Engine]:
    with Engine(EngineConfig(model=str(models.directory()), threads=1), launch=forking(zygote)) as started:
        yield started


def state(engine: Engine) -> str:
    """Asked anew every time."""
    return engine.paused


def nothing() -> None:
    pass


def pauses_of(engine: Engine) -> Pauses:
    return engine._pauses


def test_a_rounds_pause_ends_with_the_round_and_only_with_its_own(engine: Engine) -> None:
    pauses = pauses_of(engine)
    pauses.pause_for(CALL, "keep", Deadline.after(WITHIN_S), nothing)
    assert state(engine) == "paused"
    pauses.resume_from("another")
    assert state(engine) == "paused"
    pauses.resume_from(CALL)
    assert state(engine) == "running"
    pauses.resume_from(CALL)
    assert ask(engine, [5, 6, 7], greedy(4)).wait().finish == "length"


def test_an_operators_pause_outlasts_a_rounds_whichever_came_first(engine: Engine) -> None:
    pauses = pauses_of(engine)
    for first in ("operator", "round"):
        if first == "operator":
            engine.pause("keep", WITHIN_S)
        pauses.pause_for(CALL, "wait", Deadline.after(WITHIN_S), nothing)
        if first == "round":
            engine.pause("keep", WITHIN_S)
        pauses.resume_from(CALL)
        assert state(engine) == "paused"
        engine.resume()
        assert state(engine) == "running"


def test_an_operators_resume_ends_a_rounds_pause_too(engine: Engine) -> None:
    pauses = pauses_of(engine)
    pauses.pause_for(CALL, "keep", Deadline.after(WITHIN_S), nothing)
    engine.resume()
    assert state(engine) == "running"
    engine.pause("keep", WITHIN_S)
    pauses.resume_from(CALL)
    assert state(engine) == "paused"


def test_a_rounds_pause_waits_no_longer_than_it_may(engine: Engine) -> None:
    pauses, answer = pauses_of(engine), ask(engine, [5, 6, 7], greedy(1500))
    answer.piece()

    def stop() -> None:
        raise EngineStopping("the engine is being stopped")

    with pytest.raises(EngineStopping):
        pauses.pause_for(CALL, "wait", Deadline.after(WITHIN_S), stop)
    with pytest.raises(DeadlineExceeded, match="running requests to finish"):
        pauses.pause_for(CALL, "wait", Deadline.after(0.05), nothing)
    assert state(engine) == "draining"
    pauses.resume_from(CALL)
    assert state(engine) == "running"
    pauses.pause_for(CALL, "abort", Deadline.after(WITHIN_S), nothing)
    assert answer.wait().finish == "abort"


def test_an_engine_that_was_stopped_takes_no_pause(engine: Engine) -> None:
    engine.stop()
    with pytest.raises(EngineStopping):
        pauses_of(engine).pause_for(CALL, "keep", Deadline.after(WITHIN_S), nothing)
