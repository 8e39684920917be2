"""Rounds in place, in real processes: bit-exact and verified; and with a fault before or while live weights are overwritten.

After each fault: what serves is the old version or the new one, whole; or nothing serves, every rank and every answer says that the
replica is torn and why, and the next round heals it.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from liveweight.transports.registry import TRANSPORTS
from tests.support.processes.cluster import Cluster, Program
from tests.support.rounds import WORLD, assert_holds, publish_when_free

TORN = "LW-601"
OFFERS = pytest.mark.parametrize("offer", TRANSPORTS["ipc"].offers)
CELLS = [
    (mode, kind)
    for mode, row in TRANSPORTS.items()
    for kind in row.offers
    if mode == "ipc" or kind == "frozen"
]


def ready(
    cluster: Cluster, offer: str = "frozen", world: int = WORLD, **options: Any
) -> tuple[list[Program], Program]:
    """A replica in place at version 1, and its trainer."""
    ranks = cluster.replica(world, shadow="none")
    trainer = cluster.trainer(offer=offer, **options)
    assert "error" not in trainer.ask("publish", label=1)
    return ranks, trainer


def assert_torn(ranks: list[Program], trainer: Program, error: dict[str, Any]) -> None:
    """The publisher got the error, every rank raises it at its boundary, and no verification is answered."""
    assert (error["code"], error["serving"], error["retryable"]) == (TORN, None, True)
    assert "serves nothing until" in error["text"]
    calls = [rank.begin("state") for rank in ranks]
    for rank, call in zip(ranks, calls, strict=True):
        state = rank.end(call)
        assert state["version"] is None
        assert "holds a mixture since 2 failed" in state["torn"]
    assert [replica["code"] for replica in trainer.ask("verify")["replicas"]] == [TORN]


def assert_healed(ranks: list[Program], trainer: Program, label: int = 3) -> None:
    assert "error" not in publish_when_free(trainer, label)
    assert_holds(ranks, label)
    assert trainer.ask("verify")["match"]


@pytest.mark.parametrize(("mode", "offer"), CELLS)
def test_rounds_in_place_are_bit_exact_and_verified_and_cannot_be_undone(
    cluster: Cluster, mode: str, offer: str
) -> None:
    if mode in ("gdr", "rdma"):
        pytest.importorskip("nixl")
    ranks, trainer = ready(cluster, offer, transfer_mode=mode)
    assert_holds(ranks, 1)
    report = trainer.ask("publish", label=2)
    assert (report["verified"], report["offer"]) == (True, offer)
    assert_holds(ranks, 2)
    assert trainer.ask("verify")["match"]
    refused = trainer.ask("undo")["error"]
    assert (refused["code"], refused["serving"]) == ("LW-107", "2")
    assert "in place of the version before" in refused["text"]
    assert_holds(ranks, 2)


@OFFERS
def test_a_fleet_of_both_memory_modes_takes_one_offer(cluster: Cluster, offer: str) -> None:
    beside, over = cluster.replica(name="a"), cluster.replica(WORLD, name="b", shadow="none")
    trainer = cluster.trainer("ab", offer=offer, verify=offer != "live")
    for label in (1, 2):
        assert "error" not in trainer.ask("publish", label=label)
        assert_holds(beside, label)
        assert_holds(over, label)


@pytest.mark.parametrize("offer", ["frozen", "ring"])
def test_a_trainer_killed_before_the_commit_leaves_the_old_version_serving(
    cluster: Cluster, offer: str
) -> None:
    ranks, trainer = ready(cluster, offer)
    trainer.ask("hold", event="Committing")
    trainer.begin("publish", label=2)
    trainer.held("Committing")
    trainer.kill()
    assert_holds(ranks, 1)
    assert_healed(ranks, cluster.trainer(offer=offer, run="successor"))


@pytest.mark.parametrize("offer", ["frozen", "live"])
def test_a_trainer_killed_while_ranks_overwrite_leaves_the_new_version_whole(
    cluster: Cluster, offer: str
) -> None:
    """Shared memory outlives who shared it: the ranks read on, and what they hold then is verified."""
    ranks, trainer = ready(cluster, offer)
    ranks[1].ask("hold", event="OverwritingBegan")
    trainer.begin("publish", label=2)
    ranks[1].held("OverwritingBegan")
    trainer.kill()
    ranks[1].ask("go")
    assert_holds(ranks, 2)
    assert_healed(ranks, cluster.trainer(offer=offer, run="successor"))


@OFFERS
def test_a_source_revoked_before_the_first_byte_leaves_the_old_version_serving(
    cluster: Cluster, offer: str
) -> None:
    ranks, trainer = ready(cluster, offer, world=1)
    ranks[0].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    ranks[0].held("StagingBegan")
    trainer.ask("revoke")
    ranks[0].ask("go")
    error = trainer.end(call)["error"]
    assert (error["type"], error["code"], error["serving"]) == ("RoundFailed", "LW-403", "1")
    assert_holds(ranks, 1)
    assert_healed(ranks, trainer)


@pytest.mark.parametrize(
    ("offer", "moment"),
    [
        ("frozen", "StagingBegan"),
        *((offer, "OverwritingBegan") for offer in TRANSPORTS["ipc"].offers),
        ("frozen", "RankStaged"),
    ],
)
def test_a_source_revoked_while_a_rank_overwrites_tears_all_of_them(
    cluster: Cluster, offer: str, moment: str
) -> None:
    ranks, trainer = ready(cluster, offer)
    ranks[1].ask("hold", event=moment)
    ranks[0].ask("hold", event="Hook")
    call = trainer.begin("publish", label=2)
    ranks[1].held(moment)
    ranks[0].held("Hook")  # this one has all of the new version
    trainer.ask("revoke")
    ranks[1].ask("go")
    ranks[0].ask("go")
    answer = trainer.end(call)
    if moment == "RankStaged":  # it had read everything, and had made sure of it
        assert "error" not in answer
        assert_holds(ranks, 2)
        return
    assert answer["error"]["rank"] == 1
    assert_torn(ranks, trainer, answer["error"])
    assert_healed(ranks, trainer)


@pytest.mark.parametrize(("offer", "rank"), [("frozen", 0), ("ring", 1)])
def test_a_flipped_bit_tears_the_replica_and_is_named(cluster: Cluster, offer: str, rank: int) -> None:
    ranks, trainer = ready(cluster, offer)
    ranks[rank].ask("arm", what="live")
    error = trainer.ask("publish", label=2)["error"]
    assert "layers.0.q.weight" in error["text"]
    assert_torn(ranks, trainer, error)
    assert_healed(ranks, trainer)


def test_a_torn_replica_stays_torn_through_a_round_that_fails_and_heals_with_the_version_it_had(
    cluster: Cluster,
) -> None:
    ranks, trainer = ready(cluster)
    ranks[1].ask("arm", what="live")
    assert_torn(ranks, trainer, trainer.ask("publish", label=2)["error"])
    ranks[0].ask("hold", event="RoundGivenUp")
    trainer.ask("hold", event="Committing")
    trainer.begin("publish", label=3)
    trainer.held("Committing")
    trainer.kill()
    ranks[0].held("RoundGivenUp")
    ranks[0].ask("go")
    calls = [rank.begin("state") for rank in ranks]
    states = [rank.end(call) for rank, call in zip(ranks, calls, strict=True)]
    assert all("holds a mixture since 2 failed" in state["torn"] for state in states)
    assert_healed(ranks, cluster.trainer(run="successor"), label=1)


def test_a_failing_hook_tears_the_replica(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster)
    ranks[1].ask("arm", what="hook")
    error = trainer.ask("publish", label=2)["error"]
    assert (error["rank"], error["step"], "told to fail" in error["text"]) == (1, "hooks", True)
    assert_torn(ranks, trainer, error)
    assert_healed(ranks, trainer)


def test_a_stopped_rank_tears_the_replica_at_the_deadline_by_name(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, timeout_s=5.0, lease_s=3.0)
    ranks[1].ask("hold", event="OverwritingBegan")
    call = trainer.begin("publish", label=2)
    ranks[1].held("OverwritingBegan")
    ranks[1].stop()
    error = trainer.end(call)["error"]
    assert (error["rank"], error["step"], "rank 1 to commit" in error["text"]) == (1, "commit", True)
    ranks[1].signal(signal.SIGCONT)
    ranks[1].ask("go")
    assert_torn(ranks, trainer, error)
    successor = cluster.trainer(run="successor")
    assert_healed(ranks, successor)


@pytest.mark.parametrize("moment", ["StagingBegan", "Hook"])
def test_a_killed_rank_tears_the_others_at_once_and_by_name(cluster: Cluster, moment: str) -> None:
    ranks, trainer = ready(cluster)
    ranks[1].ask("hold", event=moment)
    call = trainer.begin("publish", label=2)
    ranks[1].held(moment)
    ranks[1].kill()
    error = trainer.end(call)["error"]
    assert (error["code"], error["rank"], error["serving"]) == (TORN, 1, None)
    ranks[0].expect("lost")  # its group is gone with the other rank
    ranks[0].finish()
    replaced = cluster.replica(WORLD, label=1, shadow="none")
    assert_healed(replaced, trainer)


def test_one_torn_replica_of_a_fleet_is_named_and_the_next_round_heals_it(cluster: Cluster) -> None:
    beside, over = cluster.replica(name="a"), cluster.replica(WORLD, name="b", shadow="none")
    trainer = cluster.trainer("ab")
    assert "error" not in trainer.ask("publish", label=1)
    over[0].ask("arm", what="live")
    error = trainer.ask("publish", label=2)["error"]
    assert (error["code"], error["replica"]) == (TORN, cluster.address("b"))
    assert_holds(beside, 2)
    assert_healed(over, trainer)
    assert_holds(beside, 3)
