"""Commits in place, from messages and time alone: what was written decides what is left."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from liveweight.observe import events
from liveweight.rounds import states
from liveweight.rounds.leader.round_record import NotifyRank, PutDecision, WithdrawDecision
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, Overwritten, RoundId
from tests.rounds.test_leader import NORMS, ONLY_W, World, held, version_of, without_norms

V1 = version_of(1)


@dataclass
class InPlace(World):
    """A replica in place, at version 1."""

    in_place: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        commit, round_id = self.committing(1)
        for rank in range(self.world):
            self.wrote(round_id, rank, 1)
        assert isinstance(self.answer(commit), m.Committed)

    def committing(self, label: int = 2, *, verify: bool = True) -> tuple[int, RoundId]:
        """All ranks have located the source, and the publisher has requested the commit."""
        round_id = self.opened(label, verify=verify)
        for rank in range(self.world):
            self.send(m.Staged(round=round_id, rank=rank, size_bytes=0, seconds=0.1), b"rank%d" % rank)
        self.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
        return self.call(m.Commit(round=round_id, timeout_s=5)), round_id

    def wrote(
        self,
        round_id: RoundId,
        rank: int,
        label: int = 2,
        *,
        begun: bool = True,
        fault: bool = False,
        flip: bool = False,
    ) -> int:
        """A rank reports how far it came."""
        lanes = None if fault else held(label, rank, self.world, flip=flip)
        body = m.Swapped(
            boot=round_id.boot,
            epoch=round_id.epoch,
            rank=rank,
            seat=self.seats[rank],
            seconds=0.25,
            fault=Fault(code="LW-403", message="revoked", step="commit", rank=rank) if fault else None,
            overwritten=Overwritten(begun=begun, size_bytes=10, stage_s=0.5, verify_s=0.125, lanes=lanes),
        )
        return self.call(body, b"another channel of rank%d" % rank)

    def withdrawn(self, round_id: RoundId, *, waited: bool) -> None:
        """The leader took the decision back, or came too late for that."""
        assert WithdrawDecision(round_id) in self.actions
        self.actions += self.leader.on_withdrawn(self.now_s, round_id, waited=waited)

    def settled(self, call: int) -> m.Settled:
        answer = self.answer(call)
        assert isinstance(answer, m.Settled)
        return answer

    def failed(self, commit: int) -> Fault:
        answer = self.answer(commit)
        assert isinstance(answer, m.Refusal)
        return answer.fault


def test_nothing_is_written_before_the_vote_and_all_are_compared_after_it() -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    assert isinstance(world.actions[-1], PutDecision)
    calls = [world.wrote(round_id, rank) for rank in range(2)]
    assert [world.settled(call).keep for call in calls] == [True, True]
    answer = world.answer(commit)
    assert isinstance(answer, m.Committed)
    assert (str(answer.serving), answer.undo, answer.stall_s) == ("2", None, 0.25)
    assert [(r.staged_bytes, r.stage_s, r.verify_s) for r in answer.ranks] == [(10, 0.5, 0.125)] * 2
    assert world.refused(m.Undo(publisher="p", timeout_s=5)).code == "LW-107"


def test_opened_says_that_the_source_is_read_during_the_commit() -> None:
    assert InPlace().ask(InPlace().open(2), m.Opened).in_place
    assert not World().ask(World().open(2), m.Opened).in_place


def test_a_failure_before_any_rank_has_written_leaves_the_old_version() -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    first = world.wrote(round_id, 0, begun=False, fault=True)
    assert world.answer(first) is None, "the other rank may have written"
    assert world.answer(commit) is None
    assert NotifyRank(1, m.DropShadow(round=round_id)) in world.actions
    second = world.wrote(round_id, 1, begun=False, fault=True)
    assert [(world.settled(call).torn, world.settled(call).serving) for call in (first, second)] == [
        (None, V1)
    ] * 2
    assert (world.failed(commit).code, world.serving) == ("LW-403", "1")


@pytest.mark.parametrize("how", ["a fault", "a flipped bit"])
def test_a_failure_after_a_rank_has_written_tears_all(how: str) -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    calls = [
        world.wrote(round_id, 0, begun=how != "a fault", fault=how == "a fault"),
        world.wrote(round_id, 1, flip=how != "a fault"),
    ]
    assert all("mixture" in (world.settled(call).torn or "") for call in calls)
    assert {world.settled(call).serving for call in calls} == {None}
    assert world.failed(commit).code == "LW-601"
    assert isinstance(world.leader.state, states.TornState)
    assert world.refused(m.Verify()).code == "LW-601"
    assert world.refused(m.Undo(publisher="p", timeout_s=5)).code == "LW-107"
    replica_state = world.ask(m.GetReplicaState(wait_s=0), m.ReplicaState)
    assert (replica_state.serving, replica_state.state.startswith("torn by 2")) == (None, True)
    ended = world.emitted(events.RoundEnded)[-1]
    assert isinstance(ended, events.RoundEnded)
    assert ended.outcome is events.RoundOutcome.TORN


def torn() -> InPlace:
    world = InPlace()
    _, round_id = world.committing(2)
    for rank in range(2):
        world.wrote(round_id, rank, flip=True)
    assert isinstance(world.leader.state, states.TornState)
    return world


def test_a_full_round_heals_and_one_that_ends_before_it_leaves_it_torn() -> None:
    world = torn()
    round_id = world.opened(3)
    assert world.refused(m.Verify()).code == "LW-601"
    world.ask(m.Abort(round=round_id, reason="no", wait_s=0), m.Aborted)
    assert isinstance(world.leader.state, states.TornState)
    commit, round_id = world.committing(4)
    calls = [world.wrote(round_id, rank, 4, begun=False, fault=True) for rank in range(2)]
    assert all("since 2 failed" in (world.settled(call).torn or "") for call in calls)
    assert world.failed(commit).code == "LW-403"
    commit, round_id = world.committing(1)  # also the version that it had
    for rank in range(2):
        world.wrote(round_id, rank, 1)
    assert isinstance(world.answer(commit), m.Committed)
    assert world.serving == "1"


def test_a_rank_that_joins_does_not_make_a_torn_replica_whole() -> None:
    world = torn()
    world.leader.on_lost(world.now_s, 1)
    world.join(1, serving=V1, peer=b"rank1 again")
    assert isinstance(world.leader.state, states.TornState)
    assert "was not described" in str(world.refused(world.open(3))), "what fitted may fit no more"


def test_only_what_was_not_torn_may_be_left_out_of_the_round_that_heals() -> None:
    world = InPlace(optional=(NORMS,))
    world.ask(m.Describe(structure="alone", manifest=ONLY_W), m.Described)
    _, round_id = world.committing(2)
    for rank in range(2):
        world.wrote(round_id, rank, flip=True)
    assert world.refused(without_norms(world, 3)).code == "LW-601"
    commit, round_id = world.committing(3)
    for rank in range(2):
        world.wrote(round_id, rank, 3)
    assert isinstance(world.answer(commit), m.Committed)


def test_a_decision_that_no_boundary_took_in_time_costs_nothing() -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    world.pass_time(6)
    assert world.answer(commit) is None
    world.withdrawn(round_id, waited=True)
    assert (world.failed(commit).code, world.serving) == ("LW-301", "1")


def test_a_rank_that_does_not_answer_in_time_may_have_written_and_is_named() -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    first = world.wrote(round_id, 0)
    world.pass_time(6)
    world.withdrawn(round_id, waited=False)
    fault = world.failed(commit)
    assert (fault.code, fault.rank, "rank 1 to commit" in fault.message) == ("LW-601", 1, True)
    assert world.settled(first).torn is not None
    late = world.wrote(round_id, 1, begun=False, fault=True)
    assert world.settled(late).torn == world.settled(first).torn
    assert world.leader.next_s() == float("inf")


@pytest.mark.parametrize("waited", [True, False])
def test_a_lost_rank_ends_the_commit_and_tears_the_others_if_they_had_the_decision(waited: bool) -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    world.actions += world.leader.on_lost(world.now_s, 1)
    world.withdrawn(round_id, waited=waited)
    if waited:
        assert (world.failed(commit).code, world.serving) == ("LW-205", "1")
        return
    assert world.answer(commit) is None, "the other rank has not reported yet"
    call = world.wrote(round_id, 0)
    assert (world.failed(commit).code, world.failed(commit).rank) == ("LW-601", 1)
    assert world.settled(call).torn is not None


def test_a_successor_that_joins_in_the_middle_ends_the_commit_as_torn() -> None:
    world = InPlace()
    commit, _ = world.committing(2)
    world.join(1, serving=V1, peer=b"rank1 again")
    assert world.failed(commit).code == "LW-601"
    assert isinstance(world.leader.state, states.TornState)


def test_a_verified_round_without_digests_is_not_voted_for() -> None:
    world = InPlace()
    ring = msgspec.structs.replace(world.open(2).offer, kind="ring")
    request = world.open(2)
    opened = world.ask(msgspec.structs.replace(request, digests=None, offer=ring), m.Opened).round
    assert opened is not None
    for rank in range(2):
        world.staged(opened, rank)
    assert world.refused(m.RequestVote(round=opened, lease_s=5)).code == "LW-107"
    assert request.digests is not None
    world.ask(m.Compare(round=opened, digests=request.digests), m.Compared)
    world.ask(m.RequestVote(round=opened, lease_s=5), m.Vote)


def test_a_rank_that_does_not_say_what_it_holds_is_not_believed() -> None:
    world = InPlace()
    commit, round_id = world.committing(2)
    world.wrote(round_id, 0)
    body = m.Swapped(
        boot="boot",
        epoch=round_id.epoch,
        rank=1,
        seat=world.seats[1],
        seconds=0.1,
        fault=None,
        overwritten=None,
    )
    world.call(body, b"another channel of rank1")
    assert world.failed(commit).code == "LW-601"


def test_ranks_that_disagree_about_their_memory_are_refused() -> None:
    world = World()
    body = m.Join(
        rank=1, pid=7, layout=world.leader.membership.members[1].layout, serving=None, in_place=True
    )
    assert world.ask(body, m.Refusal, peer=b"other").fault.code == "LW-103"
