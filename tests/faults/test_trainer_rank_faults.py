"""One rank of a trainer lost, stopped or late at every step of a round: until all engine ranks have staged, the others raise within the
deadline and name it; after that the round commits, and the loss shows at the next offer. The engine serves on, whole."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.processes.cluster import Cluster, Program
from tests.support.rounds import all_of, assert_holds

LOST, LATE, UNKNOWN = "LW-205", "LW-301", "LW-602"


def ready(cluster: Cluster, world: int = 3, **options: Any) -> tuple[list[Program], list[Program]]:
    """A replica of two ranks at version 1, and a trainer of several."""
    ranks = cluster.replica(2)
    trainer = cluster.trainer_ranks(world, style="rows", **options)
    assert all("error" not in answer for answer in all_of(trainer, "publish", label=1))
    return ranks, trainer


def recover(cluster: Cluster, ranks: list[Program], label: int = 9) -> None:
    """A new trainer, with all its ranks, goes on where that one stopped."""
    answers = all_of(cluster.trainer_ranks(2, style="rows", run="again"), "publish", label=label)
    assert all("error" not in answer for answer in answers), answers
    assert_holds(ranks, label)


def publish_without_the_last(trainer: list[Program], label: int, *, hurry: bool) -> list[dict[str, Any]]:
    """All but the last rank publish; rank 0 comes when the others have frozen, and, in a hurry, waits for the last one only a while."""
    rank_zero, *others = trainer[:-1]
    rank_zero.ask("hurry", timeout_s=3.0 if hurry else 60.0)
    for rank in others:
        rank.ask("offer", label=label)
    answer = rank_zero.ask("publish", label=label)
    rank_zero.ask("hurry", timeout_s=60.0)
    return [answer, *all_of(others, "wait")]


@pytest.mark.parametrize("how", ["killed", "killed in its freeze", "stopped in its freeze", "late"])
def test_a_rank_that_does_not_freeze_is_named_by_all_others(cluster: Cluster, how: str) -> None:
    gone = how.startswith("killed")
    ranks, trainer = ready(cluster)
    victim = trainer[2]
    if how == "killed":
        victim.kill()
    elif how != "late":
        victim.ask("hold", event="SourceFrozen")
        victim.begin("publish", label=2)
        victim.held("SourceFrozen")
        victim.kill() if gone else victim.stop()
    for answer in publish_without_the_last(trainer, 2, hurry=not gone):
        error = answer["error"]
        assert (error["code"], error["rank"], error["step"]) == (LOST if gone else LATE, 2, "freeze")
        assert "trainer rank 2" in error["text"]
        assert (error["serving"], error["retryable"]) == ("1", True)
    assert_holds(ranks, 1)
    if how == "late":  # it comes at last, is told how the round ended, and the next round is whole again
        assert victim.ask("publish", label=2)["error"]["rank"] == 2
        assert [answer.get("version") for answer in all_of(trainer, "publish", label=3)] == [3] * 3
        assert_holds(ranks, 3)


@pytest.mark.parametrize("moment", ["RoundOpened", "StagingBegan"])
def test_a_rank_killed_while_engine_ranks_stage_is_named_by_all_others(cluster: Cluster, moment: str) -> None:
    ranks, trainer = ready(cluster)
    ranks[1].ask("hold", event="StagingBegan")
    if moment == "RoundOpened":
        ranks[0].ask("hold", event=moment)
    calls = [one.begin("publish", label=2) for one in trainer]
    ranks[moment == "StagingBegan"].held(moment)
    trainer[2].kill()
    if moment == "RoundOpened":
        ranks[0].ask("go")
    errors = [one.end(call)["error"] for one, call in zip(trainer[:2], calls, strict=False)]
    ranks[1].ask("go")
    for error in errors:
        assert (error["code"], error["serving"], error["retryable"]) == (LOST, "1", True)
        assert "trainer rank 2" in error["text"]
    assert_holds(ranks, 1)


@pytest.mark.parametrize("moment", ["RoundOpened", "StagingBegan"])
def test_a_rank_stopped_while_its_memory_is_read_harms_nobody_before_the_next_offer(
    cluster: Cluster, moment: str
) -> None:
    ranks, trainer = ready(cluster)
    held = ranks[moment == "StagingBegan"]
    held.ask("hold", event=moment)
    calls = [one.begin("publish", label=2) for one in trainer]
    held.held(moment)
    trainer[2].stop()
    held.ask("go")
    answers = [one.end(call) for one, call in zip(trainer[:2], calls, strict=False)]
    assert [answer.get("version") for answer in answers] == [2, 2], answers
    assert_holds(ranks, 2)
    for answer in publish_without_the_last(trainer, 3, hurry=True):
        assert (answer["error"]["rank"], answer["error"]["step"]) == (2, "freeze")
        assert answer["error"]["serving"] == "2"
    assert_holds(ranks, 2)


def test_a_rank_stopped_before_its_memory_was_handed_over_is_named_by_all_others(cluster: Cluster) -> None:
    ranks = cluster.replica(2)
    trainer = cluster.trainer_ranks(3, style="rows")
    ranks[0].ask("hold", event="RoundOpened")
    for one in trainer[:2]:
        one.ask("hurry", timeout_s=15.0)
    calls = [one.begin("publish", label=1) for one in trainer]
    ranks[0].held("RoundOpened")
    trainer[2].stop()
    ranks[0].ask("go")
    for one, call in zip(trainer[:2], calls, strict=False):
        error = one.end(call)["error"]
        assert (error["code"], error["retryable"]) == (LATE, True), error
        assert "trainer rank 2" in error["text"]
    assert [rank.ask("state")["version"] for rank in ranks] == [None, None]
    recover(cluster, ranks)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("moment", ["Voting", "Hook"])
def test_a_rank_lost_after_all_have_staged_shows_at_the_next_offer(
    cluster: Cluster, moment: str, how: str
) -> None:
    ranks, trainer = ready(cluster)
    held = trainer[0] if moment == "Voting" else ranks[1]
    held.ask("hold", event=moment)
    calls = [one.begin("publish", label=2) for one in trainer]
    held.held(moment)
    trainer[2].kill() if how == "killed" else trainer[2].stop()
    held.ask("go")
    answers = [one.end(call) for one, call in zip(trainer[:2], calls, strict=False)]
    assert all(answer.get("version") == 2 for answer in answers), answers
    assert_holds(ranks, 2)
    for answer in publish_without_the_last(trainer, 3, hurry=how == "stopped"):
        assert (answer["error"]["rank"], answer["error"]["step"]) == (2, "freeze")
        assert answer["error"]["serving"] == "2"
    assert_holds(ranks, 2)


@pytest.mark.parametrize("how", ["killed", "stopped", "late"])
def test_without_rank_0_the_others_say_that_they_do_not_know(cluster: Cluster, how: str) -> None:
    ranks, trainer = ready(cluster)
    rank_zero, others = trainer[0], trainer[1:]
    all_of(others, "hurry", timeout_s=3.0)
    if how != "late":
        ranks[1].ask("hold", event="StagingBegan")
        calls = [one.begin("publish", label=2) for one in trainer][1:]
        ranks[1].held("StagingBegan")
        rank_zero.kill() if how == "killed" else rank_zero.stop()
    else:
        calls = [one.begin("publish", label=2) for one in others]
    for one, call in zip(others, calls, strict=True):
        error = one.end(call)["error"]
        assert (error["code"], "trainer rank 0" in error["text"]) == (UNKNOWN, True)
    if how != "late":
        ranks[1].ask("go")
    assert_holds(ranks, 1)
    if how == "killed":
        recover(cluster, ranks)


def test_a_freeze_that_fails_at_one_rank_fails_for_all(cluster: Cluster) -> None:
    ranks = cluster.replica(2)
    trainer = cluster.trainer_ranks(2, style="fsdp2")
    all_of(trainer, "publish", label=1)
    trainer[1].ask("fail")
    for answer in all_of(trainer, "publish", label=2):
        assert (answer["error"]["code"], answer["error"]["rank"]) == ("LW-102", 1)
    assert_holds(ranks, 1)


@pytest.mark.parametrize(("style", "code"), [("gathered", "LW-102"), ("one-shot", "LW-101")])
def test_a_failed_gather_is_run_to_its_end_by_every_rank(cluster: Cluster, style: str, code: str) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer_ranks(3, style=style)
    all_of(trainer, "publish", label=1)
    trainer[0].ask("fail")
    for answer in all_of(trainer, "publish", label=2):
        assert (answer["error"]["code"], answer["error"]["rank"], answer["error"]["step"]) == (
            code,
            0,
            "freeze",
        )
    assert [(answer["passes"], answer["ended"]) for answer in all_of(trainer, "passes")] == [(2, 2)] * 3
    assert_holds(ranks, 1)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_label_that_cannot_be_fails_the_round_at_once_on_every_rank(cluster: Cluster, wrong: int) -> None:
    ranks = cluster.replica(1)
    trainer = cluster.trainer_ranks(2, style="rows")
    began_s = time.monotonic()
    all_wrong = all_of(trainer, "publish", label=1, name=None)
    assert [answer["error"]["code"] for answer in all_wrong] == ["LW-112"] * 2
    calls = [
        rank.begin("publish", label=1, name=None if number == wrong else 1)
        for number, rank in enumerate(trainer)
    ]
    answers = [rank.end(call) for rank, call in zip(trainer, calls, strict=True)]
    assert [answer["error"]["code"] for answer in answers] == ["LW-112"] * 2
    assert "not None (NoneType)" in answers[wrong]["error"]["text"]
    assert f"the trainer, rank {wrong}" in answers[1 - wrong]["error"]["text"]
    assert time.monotonic() - began_s < 30.0, "long before the deadline of 60 s"
    assert [report.get("version") for report in all_of(trainer, "publish", label=2)] == [2] * 2
    assert_holds(ranks, 2)
