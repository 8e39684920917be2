"""Whole rounds between real processes: the ranks end up with exactly the trainer's bits, and say which version they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import model
from tests.support.processes.cluster import Cluster, Program


def assert_holds(ranks: list[Program], label: int, version: object = ...) -> None:
    """Every rank holds exactly that version's bits, and says so."""
    asked = [rank.begin("state") for rank in ranks]
    for number, (rank, call) in enumerate(zip(ranks, asked, strict=True)):
        state = rank.end(call)
        assert state["fingerprint"] == model.expected(label, number, len(ranks))
        assert state["version"] == (label if version is ... else version)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("offer", "verify", "exchange"),
    [
        ("frozen", True, "swap"),
        ("frozen", False, "copy"),
        ("live", True, "copy"),
        ("live", False, "swap"),
        ("ring", True, "swap"),
        ("ring", False, "copy"),
    ],
)
def test_ranks_follow_the_trainer(
    cluster: Cluster, world: int, offer: str, verify: bool, exchange: str
) -> None:
    ranks = cluster.replica(world, exchange=exchange, threads=2)
    trainer = cluster.trainer(offer=offer, verify=verify)
    assert_holds(ranks, 0, None)
    for label in (1, 2, 3):
        report = trainer.ask("publish", label=label)
        assert report["verified"] == verify
        assert report["offer"] == offer
        assert_holds(ranks, label)
    assert trainer.ask("undo")["serving"] == [2]
    assert_holds(ranks, 2)
    assert trainer.ask("publish", label=4)["unchanged"] is False
    assert_holds(ranks, 4)
    assert trainer.finish() == 0
    assert cluster.finish(ranks) == [0] * world


def test_what_is_installed_already_is_a_success_without_work(cluster: Cluster) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer()
    assert trainer.ask("publish", label=1)["unchanged"] is False
    assert trainer.ask("publish", label=1)["unchanged"] is True
    assert_holds(ranks, 1)


def test_a_label_cannot_stand_for_two_contents_in_one_run(cluster: Cluster) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer()
    trainer.ask("publish", label=1)
    answer = trainer.ask("publish", label=2, name=1)
    assert answer["error"]["code"] == "LW-104"
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=2)


def test_a_restarted_trainer_is_a_new_run(cluster: Cluster) -> None:
    ranks = cluster.replica(1)
    first = cluster.trainer(run="one")
    first.ask("publish", label=1, name=0)
    first.kill()
    second = cluster.trainer(run="two")
    assert "error" not in second.ask("publish", label=2, name=0)
    assert_holds(ranks, 2, 0)


def test_an_undo_cannot_be_undone_and_the_way_forward_is_a_round(cluster: Cluster) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer()
    trainer.ask("publish", label=1)
    trainer.ask("publish", label=2)
    assert trainer.ask("undo")["serving"] == [1]
    refused = trainer.ask("undo")["error"]
    assert (refused["code"], refused["serving"]) == ("LW-107", "1")
    assert_holds(ranks, 1)
    assert trainer.ask("publish", label=2)["unchanged"] is False
    assert_holds(ranks, 2)


def test_two_publishers_and_four_receivers_share_a_host(cluster: Cluster) -> None:
    replicas = {name: cluster.replica(1, name) for name in "abcd"}
    one, two = cluster.trainer("ab", run="one"), cluster.trainer("cd", run="two")
    for label in (1, 2):
        calls = [one.begin("publish", label=label), two.begin("publish", label=label + 10)]
        for trainer, call in zip((one, two), calls, strict=True):
            assert "error" not in trainer.end(call)
        for name in "ab":
            assert_holds(replicas[name], label)
        for name in "cd":
            assert_holds(replicas[name], label + 10)


def arenas_of(program: Program) -> set[str]:
    """The shared memory that a process maps, by what the kernel calls it."""
    lines = Path(f"/proc/{program.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:liveweight" in line}


@pytest.mark.parametrize("offer", ["frozen", "live", "ring"])
def test_replicas_read_at_the_same_time_and_from_the_same_memory(cluster: Cluster, offer: str) -> None:
    replicas = [cluster.replica(name=name)[0] for name in "abc"]
    trainer = cluster.trainer("abc", offer=offer)
    for replica in replicas:
        replica.ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=1)
    for replica in replicas:
        replica.held("StagingBegan")  # none of them waits for another one to be done
    first, *others = [arenas_of(replica) for replica in replicas]
    assert first
    assert all(other == first for other in others)
    assert first <= arenas_of(trainer)
    for replica in replicas:
        replica.ask("go")
    assert "error" not in trainer.end(call)
    for replica in replicas:
        assert_holds([replica], 1)


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    ranks = cluster.replica(2)
    trainer = cluster.trainer(offer="live")
    trainer.ask("publish", label=1)
    assert trainer.finish() == 0
    assert cluster.finish(ranks) == [0, 0]
    left = [path for path in cluster.directory.rglob("*") if path.is_socket()]
    assert left == []
    assert not list(Path("/dev/shm").glob("*liveweight*"))
