"""Three engines under load, and one trainer: what one of them does to a round, and what a trainer's end between two commits leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from liveweight.errors import WeightsPending
from tests.support.engine.engines import Logits, Models, ask, greedy
from tests.support.engine.fleet_scene import FleetScene, fleet_scene
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import Zygote
from tests.support.processes.real_servers import until
from tests.support.processes.stopping import stop
from tests.support.rounds import publish_when_free

Make = Callable[..., FleetScene]
PROMPT = [5, 6, 7, 8]
LONG_S = 120.0
"""For rounds that are to succeed, on a machine that is ten times slower."""


@pytest.fixture
def make(cluster: Cluster, zygote: Zygote, models: Models) -> Iterator[Make]:
    """Makes the scene of a test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(fleet_scene(cluster, zygote, models, **options))


@pytest.mark.timeout(300)
def test_one_that_fails_keeps_all_others_from_committing(
    make: Make, transformers_logits: Callable[[Path], Logits]
) -> None:
    fleet = make(timeout_s=LONG_S)
    last = fleet.engines[2].consoles.of[1]
    with fleet.load():
        assert fleet.publish("step_1", 1)["behind"] == []
        last.ask("hold", event="RankStaged")
        call = fleet.begin("step_2", 2)
        last.held("RankStaged")
        last.ask("damage")
        last.ask("go")
        error = fleet.trainer.end(call)["error"]
    assert (error["code"], error["replica"]) == ("LW-401", fleet.engines[2].address)
    assert fleet.labels == ["step_1"] * 3
    assert "error" not in fleet.publish("step_3", 3)
    assert fleet.labels == ["step_3"] * 3
    assert fleet.wrong(transformers_logits) == []


@pytest.mark.timeout(300)
def test_one_that_stands_still_is_named_at_the_deadline_and_a_quorum_goes_on_without_it(
    make: Make, transformers_logits: Callable[[Path], Logits]
) -> None:
    fleet = make(timeout_s=15.0, lease_s=10.0)
    last = fleet.engines[2]
    with fleet.load(*fleet.engines[:2]):
        assert fleet.publish("step_1", 1)["behind"] == []
        stop(last.engine.pids[1])
        error = fleet.publish("step_2", 2)["error"]
        assert (error["code"], error["replica"], error["rank"]) == ("LW-301", last.address, 1)
        assert (error["serving"], fleet.labels) == ("step_1", ["step_1"] * 3)
        fleet.trainer.finish()
        fleet.trainer = fleet.start_trainer(
            quorum=2, timeout_s=LONG_S, replica_timeout_s=10.0, run="second", behind="stand_back"
        )
        report = fleet.publish("step_3", 3)
        assert report["behind"] == [last.address]
        assert fleet.labels == ["step_3", "step_3", "step_1"]
        until(lambda: last.engine.status().state == "pending_weights", "the one behind to be marked behind")
        with pytest.raises(WeightsPending, match="behind step_3"):
            ask(last.engine, PROMPT, greedy(2))
        behind = fleet.trainer.ask("fleet")
        assert (behind["version"], behind["behind"]) == ("step_3", [last.address])
        os.kill(last.engine.pids[1], signal.SIGCONT)
        assert fleet.trainer.ask("catch_up")["behind"] == []
    assert fleet.labels == ["step_3"] * 3
    assert ask(last.engine, PROMPT, greedy(2)).wait().finish == "length"
    assert fleet.publish("step_4", 1)["behind"] == []
    assert fleet.wrong(transformers_logits) == []


@pytest.mark.timeout(300)
def test_a_trainer_killed_between_two_commits_leaves_whole_versions_and_the_next_heals(
    make: Make, transformers_logits: Callable[[Path], Logits]
) -> None:
    fleet = make(timeout_s=LONG_S)
    with fleet.load():
        assert fleet.publish("step_1", 1)["behind"] == []
        fleet.trainer.ask("hold", event="Committing", rank=1)
        fleet.begin("step_2", 2)
        fleet.trainer.held("Committing")
        until(lambda: [fleet.labels[0], fleet.labels[2]] == ["step_2"] * 2, "two commits of three")
        fleet.trainer.kill()
        fleet.trainer = fleet.start_trainer(run="successor", timeout_s=LONG_S)
        found = fleet.trainer.ask("fleet")
        assert fleet.labels == ["step_2", "step_1", "step_2"]
        assert (found["version"], found["behind"]) == ("step_2", [fleet.engines[1].address])
        fleet.seeds["step_3"] = 3
        assert "error" not in publish_when_free(fleet.trainer, 3, name="step_3")
    assert fleet.labels == ["step_3"] * 3
    assert fleet.wrong(transformers_logits) == []


@pytest.mark.timeout(300)
def test_a_replica_that_was_started_anew_is_noticed_and_takes_requests_once_it_has_caught_up(
    make: Make,
) -> None:
    fleet = make(quorum=2, timeout_s=LONG_S, replica_timeout_s=15.0)
    first = fleet.engines[0]
    assert fleet.publish("step_1", 1)["restarted"] == []
    first.engine.stop()
    assert fleet.publish("step_2", 2)["behind"] == [first.address]
    first.start(await_weights=True)
    with pytest.raises(WeightsPending, match="started on its checkpoint"):
        ask(first.engine, PROMPT, greedy(2))
    found = fleet.trainer.ask("fleet")
    assert (found["behind"], found["restarted"]) == ([first.address], [first.address])
    caught: dict[str, Any] = fleet.trainer.ask("catch_up")
    assert (caught["behind"], caught["restarted"]) == ([], [first.address])
    assert fleet.labels == ["step_2"] * 3
    assert ask(first.engine, PROMPT, greedy(2)).wait().finish == "length"
    assert fleet.trainer.ask("catch_up") == {"id": caught["id"] + 1, "caught_up": False}
    undone = fleet.trainer.ask("undo")["serving"]
    assert (undone, fleet.labels) == (["initial", "step_1", "step_1"], ["initial", "step_1", "step_1"])
