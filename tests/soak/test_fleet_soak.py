"""Fifty rounds over three engines under load, each with a fault drawn by lot: no token of a mixture, no wait past its deadline."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.engines import Logits, Models
from tests.support.engine.fleet_scene import FleetEngine, FleetScene, fleet_scene
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import Zygote
from tests.support.processes.stopping import stop
from tests.support.rounds import publish_when_free

pytestmark = pytest.mark.soak
ROUNDS, TIMEOUT_S, LEASE_S = 50, 8.0, 5.0
SLACK_S = 60.0
"""What votes, commits and aborts may take beyond a round's own time, on a machine that is ten times slower."""
FAULTS = ("none", "none", "damage", "stop", "kill trainer", "restart engine")


def afflicted(
    fleet: FleetScene, fault: str, victim: FleetEngine, name: str, seed: int, lots: random.Random
) -> None:
    """One round in which that happens to that engine, or to the trainer."""
    console = victim.consoles.of[1]
    match fault:
        case "damage":
            console.ask("hold", event="RankStaged")
            call = fleet.begin(name, seed)
            console.held("RankStaged")
            console.ask("damage")
            console.ask("go")
            assert victim.address in fleet.trainer.end(call)["behind"]
        case "stop":
            stop(victim.engine.pids[1])
            try:
                assert fleet.publish(name, seed)["behind"] == [victim.address]
            finally:
                os.kill(victim.engine.pids[1], signal.SIGCONT)
        case "kill trainer":
            fleet.trainer.ask("hold", event=lots.choice(["Voting", "Committing"]), rank=lots.randrange(3))
            fleet.begin(name, seed)
            fleet.trainer.expect("held")
            fleet.trainer.kill()
            fleet.trainer = fleet.start_trainer(
                quorum=2, timeout_s=TIMEOUT_S, lease_s=LEASE_S, run=f"after-{name}"
            )
        case "restart engine":
            victim.engine.stop()
            assert fleet.publish(name, seed)["behind"] == [victim.address]
            victim.start(await_weights=True)
        case _:
            assert "error" not in fleet.publish(name, seed)


@pytest.mark.timeout(1800)
def test_fifty_rounds_with_faults_by_lot(
    cluster: Cluster, zygote: Zygote, models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    lots = random.Random(8)
    with fleet_scene(cluster, zygote, models, quorum=2, timeout_s=TIMEOUT_S, lease_s=LEASE_S) as fleet:
        for number in range(ROUNDS):
            fault, victim = lots.choice(FAULTS), lots.choice(fleet.engines)
            others = [member for member in fleet.engines if member is not victim]
            began_s = time.monotonic()
            with fleet.load(*others):
                afflicted(fleet, fault, victim, f"step_{number}", lots.randrange(1, 4), lots)
                fleet.seeds[f"healed_{number}"] = seed = lots.randrange(1, 4)
                healed = publish_when_free(fleet.trainer, seed, name=f"healed_{number}")
                assert healed.get("behind") == [], (fault, healed)
            assert time.monotonic() - began_s < 2 * TIMEOUT_S + SLACK_S
            assert fleet.labels == [f"healed_{number}"] * 3
        assert fleet.wrong(transformers_logits) == []
