"""Faults at every step of a round, in real processes, at moments that the round's own events mark.

After each: the live weights are bit for bit the old version or, past the commit, the new one; the error says who, where, how long,
what serves and whether to retry; and the next round succeeds.
"""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import model
from tests.support.cluster import Cluster, Program
from tests.support.program import REPLICA

OFFERS = pytest.mark.parametrize("offer", ["frozen", "live"])
WORLD = 2
BEFORE_COMMIT = [("RoundOpened", REPLICA), ("StagingBegan", 1), ("Staged", 1), ("Verified", REPLICA)]
"""Moments of the leader, which is in rank 0's process, and of rank 1, in a round's order."""


def assert_holds(ranks: list[Program], label: int, version: object = None) -> None:
    calls = [rank.begin("state") for rank in ranks]
    for number, (rank, call) in enumerate(zip(ranks, calls, strict=True)):
        state = rank.end(call)
        assert state["fingerprint"] == model.expected(label, number, len(ranks))
        assert state["version"] == (label if version is None else version)


def publish_when_free(trainer: Program, label: int, within_s: float = 60.0) -> dict[str, Any]:
    """Publish; while an old round still holds the replica, try again."""
    ends_s = time.monotonic() + within_s
    while True:
        answer = trainer.ask("publish", label=label)
        if answer.get("error", {}).get("code") != "LW-106" or time.monotonic() > ends_s:
            return answer


def weights_of(programs: list[Program]) -> list[tuple[int, int]]:
    """Descriptors and threads of every process."""
    counted = []
    for program in programs:
        status = Path(f"/proc/{program.pid}/status").read_text()
        threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads"))
        counted.append((len(list(Path(f"/proc/{program.pid}/fd").iterdir())), threads))
    return counted


def assert_no_growth(programs: list[Program], before: list[tuple[int, int]]) -> None:
    """No process has more descriptors or threads than before, once those of the last round have ended."""
    ends_s = time.monotonic() + 20.0
    while (now := weights_of(programs)) != before and time.monotonic() < ends_s:
        continue
    assert all(a <= b for new, old in zip(now, before, strict=True) for a, b in zip(new, old, strict=True))


def ready(cluster: Cluster, offer: str, **options: Any) -> tuple[list[Program], Program]:
    """A replica at version 1, and its trainer."""
    ranks = cluster.replica(WORLD)
    trainer = cluster.trainer(offer=offer, **options)
    assert "error" not in trainer.ask("publish", label=1)
    return ranks, trainer


@OFFERS
@pytest.mark.parametrize("moment", BEFORE_COMMIT, ids=lambda moment: moment[0])
def test_a_killed_trainer_leaves_the_old_version_serving(
    cluster: Cluster, offer: str, moment: tuple[str, int]
) -> None:
    ranks, trainer = ready(cluster, offer, timeout_s=4.0, lease_s=2.0)
    name, rank = moment
    held = ranks[max(0, rank)]
    held.ask("hold", event=name, rank=rank)
    trainer.begin("publish", label=2)
    held.held(name)
    trainer.kill()
    held.ask("go")
    successor = cluster.trainer(offer=offer, run="successor")
    assert_holds(ranks, 1)
    assert "error" not in publish_when_free(successor, 3)
    assert_holds(ranks, 3)


@OFFERS
def test_a_trainer_killed_during_the_commit_leaves_the_new_version_whole(
    cluster: Cluster, offer: str
) -> None:
    ranks, trainer = ready(cluster, offer)
    ranks[1].ask("hold", event="Hook")
    trainer.begin("publish", label=2)
    ranks[1].held("Hook")
    trainer.kill()
    ranks[1].ask("go")
    assert_holds(ranks, 2)
    assert "error" not in publish_when_free(cluster.trainer(offer=offer, run="successor"), 3)
    assert_holds(ranks, 3)


@OFFERS
@pytest.mark.parametrize("moment", ["StagingBegan", "Staged", "Hook"])
def test_a_killed_rank_fails_the_round_at_once_and_by_name(cluster: Cluster, offer: str, moment: str) -> None:
    ranks, trainer = ready(cluster, offer)
    ranks[1].ask("hold", event=moment)
    call = trainer.begin("publish", label=2)
    ranks[1].held(moment)
    ranks[1].kill()
    error = trainer.end(call)["error"]
    assert (error["code"], error["rank"], error["serving"], error["retryable"]) == ("LW-205", 1, "1", True)
    lost = ranks[0].expect("lost")
    assert lost["fingerprint"] == model.expected(1, 0, WORLD)
    ranks[0].ended()
    replaced = cluster.replica(WORLD, label=1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(replaced, 3)


@OFFERS
@pytest.mark.parametrize(
    ("moment", "step"), [("StagingBegan", "stage"), ("Staged", "verify"), ("Hook", "commit")]
)
def test_a_stopped_rank_is_named_at_the_deadline(
    cluster: Cluster, offer: str, moment: str, step: str
) -> None:
    ranks, trainer = ready(cluster, offer, timeout_s=4.0, lease_s=2.0)
    for label in ("warm", "warm too", "1 again"):  # both shadows are bound
        before = weights_of([*ranks, trainer])
        assert "error" not in trainer.ask("publish", label=1, name=label)
    ranks[1].ask("hold", event=moment)
    call = trainer.begin("publish", label=2)
    ranks[1].held(moment)
    ranks[1].signal(signal.SIGSTOP)
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


@OFFERS
@pytest.mark.parametrize("what", ["shadow", "arena"])
def test_a_flipped_bit_is_noticed_before_the_commit(cluster: Cluster, offer: str, what: str) -> None:
    ranks, trainer = ready(cluster, offer)
    (ranks[1] if what == "shadow" else trainer).ask("arm", what=what)
    error = trainer.ask("publish", label=2)["error"]
    assert (error["code"], error["step"], error["serving"]) == ("LW-401", "verify", "1")
    assert ".weight" in error["text"]
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


@OFFERS
def test_a_hook_that_fails_takes_every_rank_back(cluster: Cluster, offer: str) -> None:
    ranks, trainer = ready(cluster, offer)
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


def test_a_reader_that_lags_is_revoked_by_the_next_freeze(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", timeout_s=3.0, lease_s=2.0)
    ranks[1].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    ranks[1].held("StagingBegan")
    ranks[1].signal(signal.SIGSTOP)
    assert trainer.end(call)["error"]["rank"] == 1
    assert (
        trainer.ask("publish", label=3)["error"]["rank"] == 1
    )  # the arena holds 3 now, rank 1 still wants 2
    ranks[1].signal(signal.SIGCONT)
    ranks[1].ask("go")
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=4)
    assert_holds(ranks, 4)


@OFFERS
def test_a_second_publisher_is_refused_while_a_round_is_open(cluster: Cluster, offer: str) -> None:
    ranks, trainer = ready(cluster, offer)
    other = cluster.trainer(run="other")
    ranks[1].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    ranks[1].held("StagingBegan")
    error = other.ask("publish", label=9)["error"]
    assert error["code"] == "LW-106"
    assert str(trainer.pid) in error["text"]
    ranks[1].ask("go")
    assert "error" not in trainer.end(call)
    assert_holds(ranks, 2)
    assert "error" not in other.ask("publish", label=9)
    assert_holds(ranks, 9)


def test_a_commit_after_the_lease_is_refused(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen", lease_s=1.0)
    ranks[0].ask("hold", event="Voted")
    call = trainer.begin("publish", label=2)
    ranks[0].held("Voted")
    trainer.signal(signal.SIGSTOP)
    ends_s = time.monotonic() + 1.5
    while time.monotonic() < ends_s:
        ranks[1].signal(signal.SIGCONT)  # nothing to do but let the lease pass
    ranks[0].ask("go")
    trainer.signal(signal.SIGCONT)
    error = trainer.end(call)["error"]
    assert error["serving"] == "1"
    assert_holds(ranks, 1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(ranks, 3)


def test_a_publisher_killed_between_two_commits_leaves_each_replica_whole(cluster: Cluster) -> None:
    first, second = cluster.replica(1, "a"), cluster.replica(1, "b")
    trainer = cluster.trainer("ab", lease_s=1.0)
    assert "error" not in trainer.ask("publish", label=1)
    second[0].ask("hold", event="Voted")
    trainer.begin("publish", label=2)
    second[0].held("Voted")
    ends_s = time.monotonic() + 30.0
    while first[0].ask("state")["version"] != 2 and time.monotonic() < ends_s:
        continue
    trainer.kill()
    ends_s = time.monotonic() + 1.5
    while time.monotonic() < ends_s:
        first[0].ask("state")
    second[0].ask("go")
    assert_holds(first, 2)
    assert_holds(second, 1)
    assert "error" not in publish_when_free(cluster.trainer("ab", run="successor"), 3)
    assert_holds(first, 3)
    assert_holds(second, 3)


@OFFERS
@pytest.mark.parametrize(("moment", "rank"), [("RoundOpened", REPLICA), ("Staged", 0), ("Hook", 0)])
def test_a_killed_leader_ends_the_round_and_its_successor_is_found(
    cluster: Cluster, offer: str, moment: str, rank: int
) -> None:
    ranks, trainer = ready(cluster, offer)
    ranks[0].ask("hold", event=moment, rank=rank)
    call = trainer.begin("publish", label=2)
    ranks[0].held(moment)
    ranks[0].kill()
    error = trainer.end(call)["error"]
    assert error["code"] in ("LW-205", "LW-602")  # gone; or gone after it was told to commit
    lost = ranks[1].expect("lost")
    assert lost["fingerprint"] in (model.expected(1, 1, WORLD), model.expected(2, 1, WORLD))
    ranks[1].ended()
    replaced = cluster.replica(WORLD, label=1)
    assert "error" not in trainer.ask("publish", label=3)
    assert_holds(replaced, 3)


def test_a_quorum_goes_on_without_a_straggler_which_catches_up(cluster: Cluster) -> None:
    first, second = cluster.replica(1, "a"), cluster.replica(1, "b")
    trainer = cluster.trainer("ab", quorum=1, timeout_s=4.0, lease_s=2.0)
    assert trainer.ask("publish", label=1)["behind"] == []
    second[0].ask("hold", event="StagingBegan")
    call = trainer.begin("publish", label=2)
    second[0].held("StagingBegan")
    second[0].signal(signal.SIGSTOP)
    assert trainer.end(call)["behind"] == [cluster.address("b")]
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
    ranks[0].ask("hold", event="RoundOpened", rank=REPLICA)
    call = trainer.begin("publish", label=2)
    ranks[0].held("RoundOpened")
    ends_s = time.monotonic() + 4.0
    while time.monotonic() < ends_s:
        ranks[1].signal(signal.SIGCONT)
    ranks[0].ask("go")
    assert "error" not in trainer.end(call)
    assert_holds(ranks, 2)


def test_memory_that_cannot_be_had_fails_the_round_and_no_more(cluster: Cluster) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer()
    trainer.ask("limit", on=True)
    assert trainer.ask("publish", label=1)["error"]["code"] == "LW-502"
    trainer.ask("limit", on=False)
    ranks[0].ask("limit", on=True)
    error = trainer.ask("publish", label=1)["error"]
    assert (error["code"], error["rank"]) == ("LW-502", 0)
    ranks[0].ask("limit", on=False)
    assert "error" not in trainer.ask("publish", label=1)
    assert_holds(ranks, 1)


def test_garbage_on_the_leaders_socket_disturbs_nobody(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen")
    for noise in (b"", b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(cluster.address().removeprefix("ipc://"))
            stranger.sendall(noise)
    assert "error" not in trainer.ask("publish", label=2)
    assert_holds(ranks, 2)


def test_a_trainer_without_the_secret_is_told_so(cluster: Cluster) -> None:
    ranks, trainer = ready(cluster, "frozen")
    stranger = cluster.start_trainer(secret=str(cluster.directory / "another"))
    assert stranger.ended() == 1
    assert "error" not in trainer.ask("publish", label=2)
    assert_holds(ranks, 2)
