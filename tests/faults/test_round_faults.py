"""Faults at every step of a round, in every cell of transfer mode, offer and hosts, at moments that the round's own events mark.

After each: the live weights are bit for bit the old version or, past the commit, the new one; the error says who, where, how long,
what serves and whether to retry; and the next round succeeds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support import model
from tests.support.cells import Scene, in_cells, scene_of
from tests.support.processes.cluster import Cluster, Program
from tests.support.programs.program import REPLICA
from tests.support.rounds import (
    WORLD,
    assert_holds,
    assert_no_growth,
    publish_when_free,
    ready,
    weights_of,
)

BEFORE_COMMIT = [("RoundOpened", REPLICA), ("StagingBegan", 1), ("RankStaged", 1), ("RankVerified", REPLICA)]
"""Moments of the leader, which is in rank 0's process, and of rank 1, in a round's order."""
VOTE = "Voting"
"""A moment of the trainer's: all replicas have verified, and no vote was requested."""


@pytest.fixture
def scene(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Scene]:
    with scene_of(cluster, request.param) as made:
        yield made


def holder_of(moment: str, rank: Program, trainer: Program) -> Program:
    """Whose moment it is."""
    return trainer if moment == VOTE else rank


@in_cells()
@pytest.mark.parametrize("moment", BEFORE_COMMIT, ids=lambda moment: moment[0])
def test_a_killed_trainer_leaves_the_old_version_serving(scene: Scene, moment: tuple[str, int]) -> None:
    ranks, trainer = scene.ready(timeout_s=4.0, lease_s=2.0)
    name, rank = moment
    held = ranks[max(0, rank)]
    held.ask("hold", event=name, rank=rank)
    trainer.begin("publish", label=2)
    held.held(name)
    trainer.kill()
    held.ask("go")
    successor = scene.trainer(run="successor")
    assert_holds(ranks, 1)
    assert "error" not in publish_when_free(successor, 3)
    assert_holds(ranks, 3)


@pytest.mark.parametrize(
    ("sent", "seen"),
    [(signal.SIGKILL, "RoundGivenUp"), (signal.SIGSTOP, "LeaseExpired")],
    ids=["killed", "stopped"],
)
def test_a_trainer_gone_after_the_votes_leaves_the_old_version_serving(
    cluster: Cluster, sent: signal.Signals, seen: str
) -> None:
    ranks, trainer = ready(cluster, "frozen", lease_s=1.0)
    trainer.ask("hold", event="Committing")
    ranks[0].ask("hold", event=seen)
    trainer.begin("publish", label=2)
    trainer.held("Committing")
    trainer.signal(sent)
    ranks[0].held(seen)
    ranks[0].ask("go")
    assert_holds(ranks, 1)
    assert "error" not in cluster.trainer(run="successor").ask("publish", label=3)
    assert_holds(ranks, 3)


@in_cells()
def test_a_trainer_killed_during_the_commit_leaves_the_new_version_whole(scene: Scene) -> None:
    ranks, trainer = scene.ready()
    ranks[1].ask("hold", event="Hook")
    trainer.begin("publish", label=2)
    ranks[1].held("Hook")
    trainer.kill()
    ranks[1].ask("go")
    assert_holds(ranks, 2)
    assert "error" not in publish_when_free(scene.trainer(run="successor"), 3)
    assert_holds(ranks, 3)


@in_cells()
@pytest.mark.parametrize("moment", ["StagingBegan", "RankStaged", VOTE, "Hook"])
def test_a_killed_rank_fails_the_round_at_once_and_by_name(scene: Scene, moment: str) -> None:
    ranks, trainer = scene.ready()
    holder = holder_of(moment, ranks[1], trainer)
    holder.ask("hold", event=moment)
    call = trainer.begin("publish", label=2)
    holder.held(moment)
    ranks[1].kill()
    if holder is trainer:
        trainer.ask("go")
    error = trainer.end(call)["error"]
    assert (error["code"], error["serving"], error["retryable"]) == ("LW-205", "1", True)
    assert error["rank"] == 1
    lost = ranks[0].expect("lost")
    assert lost["fingerprint"] == model.expected(1, 0, WORLD)
    ranks[0].finish()
    replaced = scene.replica(label=1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(replaced, 3)


@in_cells()
@pytest.mark.parametrize(
    ("moment", "step"), [("StagingBegan", "stage"), ("RankStaged", "verify"), ("Hook", "commit")]
)
def test_a_stopped_rank_is_named_at_the_deadline(scene: Scene, moment: str, step: str) -> None:
    ranks, trainer = scene.ready(timeout_s=4.0, lease_s=2.0)
    for label in ("warm", "warm too", "1 again"):  # both shadows are bound
        before = weights_of([*ranks, trainer])
        assert "error" not in trainer.ask("publish", label=1, name=label)
    ranks[1].ask("hold", event=moment)
    if step == "verify":
        trainer.ask("hold", event="Verifying")
    call = trainer.begin("publish", label=2)
    ranks[1].held(moment)
    if (
        step == "verify"
    ):  # what a rank has sent may still be in it when it is stopped: the leader must have received it
        trainer.held("Verifying")
        trainer.ask("go")
    ranks[1].stop()
    error = trainer.end(call)["error"]
    assert (error["code"], error["rank"], error["step"], error["serving"]) == ("LW-301", 1, step, "1 again")
    assert error["retryable"]
    assert error["waited_s"] >= 1.0
    ranks[1].signal(signal.SIGCONT)
    ranks[1].ask("go")
    assert_holds(ranks, 1, "1 again")
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)
    assert_no_growth([*ranks, trainer], before)


@in_cells()
@pytest.mark.parametrize("what", ["shadow", "arena"])
def test_a_flipped_bit_is_noticed_before_the_commit(scene: Scene, what: str) -> None:
    if (scene.cell.offer, what) == ("ring", "arena"):
        pytest.skip("its buckets carry checksums: below")
    ranks, trainer = scene.ready()
    (ranks[1] if what == "shadow" else trainer).ask("arm", what=what)
    error = trainer.ask("publish", label=2)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-401", "verify", "1")
    assert ".weight" in error["text"]
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


def test_a_damaged_bucket_of_a_ring_is_named_and_read_again(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "ring")
    trainer.ask("arm", what="bucket")
    assert "error" not in trainer.ask("publish", label=2)
    assert "weight" in trainer.expect("damaged")["damaged"]
    assert_holds(ranks, 2)


def test_a_bucket_that_is_always_damaged_fails_the_round_by_name(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "ring")
    trainer.ask("arm", what="every bucket")
    error = trainer.ask("publish", label=2)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-402", "stage", "1")
    assert "weight" in error["text"]
    trainer.ask("arm", what="no bucket")
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


@in_cells()
def test_a_hook_that_fails_takes_every_rank_back(scene: Scene) -> None:
    ranks, trainer = scene.ready()
    assert "error" not in trainer.ask("publish", label=1, name="1 again")
    assert "error" not in trainer.ask("publish", label=1)
    before = weights_of([*ranks, trainer])
    ranks[1].ask("arm", what="hook")
    error = trainer.ask("publish", label=2)["error"]
    assert (error["rank"], error["step"], error["serving"]) == (1, "hooks", "1")
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)
    assert_no_growth([*ranks, trainer], before)


def test_a_rank_stopped_at_the_vote_keeps_the_old_version_serving(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", timeout_s=6.0, lease_s=5.0)
    trainer.ask("hold", event=VOTE)
    call = trainer.begin("publish", label=2)
    trainer.held(VOTE)
    ranks[1].stop()
    trainer.ask("go")
    # The leader votes for its ranks, who have verified; the commit waits for them.
    error = trainer.end(call)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-301", "commit", "1")
    assert "rank" in error["text"]
    assert error["retryable"]
    ranks[1].signal(signal.SIGCONT)
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


def test_a_leader_stopped_at_the_vote_is_named_when_the_lease_is_over(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", lease_s=1.0)
    trainer.ask("hold", event=VOTE)
    call = trainer.begin("publish", label=2)
    trainer.held(VOTE)
    ranks[0].stop()
    trainer.ask("go")
    error = trainer.end(call)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-301", "vote", "1")
    assert error["replica"] == cluster.address()
    assert error["waited_s"] >= 1.0
    ranks[0].signal(signal.SIGCONT)
    assert "error" not in publish_when_free(trainer, 3)
    assert_holds(ranks, 3)


def test_a_reader_that_lags_is_revoked_by_the_next_freeze(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", timeout_s=3.0, lease_s=2.0)
    ranks[1].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    ranks[1].held("StagingBegan")
    ranks[1].stop()
    assert trainer.end(call)["error"]["rank"] == 1
    assert (
        trainer.ask("publish", label=3)["error"]["rank"] == 1
    )  # the arena holds 3 now, rank 1 still wants 2
    ranks[1].signal(signal.SIGCONT)
    ranks[1].ask("go")
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=4)
    assert_holds(ranks, 4)


@pytest.mark.parametrize(
    ("offer", "moment"),
    [
        ("frozen", "StagingBegan"),
        ("live", "StagingBegan"),
        ("ring", "StagingBegan"),
        ("frozen", "RankStaged"),
        ("frozen", VOTE),
        ("frozen", "Hook"),
    ],
)
def test_a_second_publisher_is_refused_while_a_round_is_open(
    cluster: Cluster, offer: str, moment: str
) -> None:
    ranks, trainer = ready(cluster, offer)
    other = cluster.trainer(run="other")
    holder = holder_of(moment, ranks[1], trainer)
    holder.ask("hold", event=moment)
    call = trainer.begin("publish", label=2)
    holder.held(moment)
    error = other.ask("publish", label=9)["error"]
    assert error["code"] == "LW-106"
    assert str(trainer.pid) in error["text"]
    holder.ask("go")
    assert "error" not in trainer.end(call)
    assert_holds(ranks, 2)
    assert "error" not in other.ask("publish", label=9)
    assert_holds(ranks, 9)


def test_a_commit_after_the_lease_is_refused(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", lease_s=1.0)
    trainer.ask("hold", event="Committing")
    ranks[0].ask("hold", event="LeaseExpired")
    call = trainer.begin("publish", label=2)
    trainer.held("Committing")
    ranks[0].held("LeaseExpired")
    ranks[0].ask("go")
    trainer.ask("go")
    error = trainer.end(call)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-107", "commit", "1")
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


def test_a_publisher_killed_between_two_commits_leaves_each_replica_whole(cluster: Cluster) -> None:
    first, second = cluster.replica(1, "a"), cluster.replica(1, "b")
    trainer = cluster.trainer("ab", lease_s=1.0)
    assert "error" not in trainer.ask("publish", label=1)
    trainer.ask("hold", event="Committing", rank=1)
    first[0].ask("hold", event="RoundCommitted", rank=REPLICA)
    second[0].ask("hold", event="RoundGivenUp")
    trainer.begin("publish", label=2)
    trainer.held("Committing")
    first[0].held("RoundCommitted")
    trainer.kill()
    first[0].ask("go")
    second[0].held("RoundGivenUp")
    second[0].ask("go")
    assert_holds(first, 2)
    assert_holds(second, 1)
    assert "error" not in publish_when_free(cluster.trainer("ab", run="successor"), 3)
    assert_holds(first, 3)
    assert_holds(second, 3)


@in_cells()
@pytest.mark.parametrize(
    ("moment", "rank"), [("RoundOpened", REPLICA), ("RankStaged", 0), (VOTE, 0), ("Hook", 0)]
)
def test_a_killed_leader_ends_the_round_and_its_successor_is_found(
    scene: Scene, moment: str, rank: int
) -> None:
    ranks, trainer = scene.ready()
    holder = holder_of(moment, ranks[0], trainer)
    holder.ask("hold", event=moment, rank=rank)
    call = trainer.begin("publish", label=2)
    holder.held(moment)
    ranks[0].kill()
    if holder is trainer:
        trainer.ask("go")
    error = trainer.end(call)["error"]
    assert error["code"] in ("LW-205", "LW-602")  # gone; or gone after it was told to commit
    lost = ranks[1].expect("lost")
    assert lost["fingerprint"] in (model.expected(1, 1, WORLD), model.expected(2, 1, WORLD))
    ranks[1].finish()
    replaced = scene.replica(label=1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(replaced, 3)


def test_a_quorum_goes_on_without_a_straggler_which_catches_up(cluster: Cluster) -> None:
    first, second = cluster.replica(1, "a"), cluster.replica(1, "b")
    trainer = cluster.trainer("ab", quorum=1, timeout_s=4.0, lease_s=2.0)
    assert trainer.ask("publish", label=1)["behind"] == []
    second[0].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    second[0].held("StagingBegan")
    second[0].stop()
    report = trainer.end(call)
    assert report.get("behind") == [cluster.address("b")], report
    assert_holds(first, 2)
    second[0].signal(signal.SIGCONT)
    second[0].ask("go")
    assert_holds(second, 1)
    assert publish_when_free(trainer, 3)["behind"] in ([], [cluster.address("b")])
    ends_s = time.monotonic() + 60.0
    while second[0].ask("state")["version"] != 4 and time.monotonic() < ends_s:
        publish_when_free(trainer, 4)
    assert_holds(first, 4)
    assert_holds(second, 4)


def test_a_leader_that_stands_still_for_a_while_is_waited_for(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen")
    ranks[0].ask("hold", event="RankVerified", rank=REPLICA)
    trainer.ask("hold", event="Silence")
    call = trainer.begin("publish", label=2)
    ranks[0].held("RankVerified")
    trainer.held("Silence")  # it has asked how far the round is, and got no answer
    ranks[0].ask("go")
    trainer.ask("go")
    assert "error" not in trainer.end(call)
    assert_holds(ranks, 2)
