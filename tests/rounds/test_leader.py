"""The leader's decisions, from messages and time alone: fences, leases, votes, outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from liveweight.errors import LiveWeightError
from liveweight.observe import events
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.rounds.leader.leader import Leader
from liveweight.rounds.leader.round_record import (
    Action,
    EmitEvent,
    NotifyRank,
    PutDecision,
    SendReply,
    WithdrawDecision,
)
from liveweight.rounds.states import ServingState
from liveweight.spec.digest import ContentDigest, Lanes, partial
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, packed, place
from liveweight.spec.manifest import Manifest, OptionalGroup, TensorSpec, Version
from liveweight.spec.region import box, whole
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, Offer, RankTimes, RoundId

W = TensorSpec(name="w", dtype=DType.FLOAT32, shape=(4, 3))
NORM = TensorSpec(name="norm", dtype=DType.FLOAT32, shape=(3,))
MANIFEST = Manifest(tensors=(W, NORM))
OFFER = Offer(mode="ipc", kind="frozen", source="ipc:///nowhere", layout="l", generation=1)
PUBLISHER, PEER = b"publisher", 1

B = TypeVar("B", bound=m.Message)


def layout_of(rank: int, world: int) -> Layout:
    """Rows of w are split over the ranks; every rank has the norm."""
    rows = 4 // world
    pieces = [Piece(tensor=W, region=box((rank * rows, (rank + 1) * rows), (0, 3)))]
    placements = place(pieces, memory=0, shape=(rows, 3)) + place(
        [Piece(tensor=NORM, region=whole(NORM.shape))], memory=1, shape=(3,)
    )
    return Layout(tensors=(W, NORM), memories_bytes=(rows * 12, 12), placements=tuple(placements))


def content(label: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    rng = np.random.default_rng(label)
    return {"w": rng.random((4, 3), dtype=np.float32), "norm": rng.random(3, dtype=np.float32)}


def offered(label: int) -> Lanes:
    values, layout = content(label), packed(MANIFEST.tensors)
    memory = np.zeros(layout.memories_bytes[0], dtype=np.uint8)
    for placement in layout.placements:
        raw = values[placement.name].view(np.uint8).reshape(-1)
        memory[placement.offset_bytes : placement.offset_bytes + len(raw)] = raw
    return np.stack([partial(memory, p, s) for p, s in zip(layout.placements, MANIFEST, strict=True)])


def version_of(label: int, *, run: str = "run") -> Version:
    return Version(run=run, label=label, digest=ContentDigest(MANIFEST).of(offered(label)))


def held(label: int, rank: int, world: int, *, flip: bool = False) -> bytes:
    values, layout, rows = content(label), layout_of(rank, world), 4 // world
    memories = [values["w"][rank * rows : (rank + 1) * rows].copy(), values["norm"].copy()]
    raw = [memory.reshape(-1).view(np.uint8).copy() for memory in memories]
    if flip:
        raw[1][0] ^= 1
    specs = layout.specs()
    lanes = np.stack([partial(raw[p.memory], p, specs[p.name]) for p in layout.placements])
    return lanes_to_bytes(lanes)


@dataclass
class World:
    """A leader with joined ranks, a clock, and the actions that it returned."""

    world: int = 2
    now_s: float = 0.0
    actions: list[Action] = field(default_factory=list)
    calls: int = 0
    seats: dict[int, int] = field(default_factory=dict)
    optional: tuple[OptionalGroup, ...] = ()
    in_place: bool = False

    def __post_init__(self) -> None:
        self.leader = Leader(replica="engine", boot="boot", world=self.world)
        for rank in range(self.world):
            self.join(rank)
        self.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)

    def join(self, rank: int, serving: Version | None = None, peer: bytes | None = None) -> None:
        body = m.Join(
            rank=rank,
            pid=100 + rank,
            layout=layout_of(rank, self.world),
            serving=serving,
            optional=self.optional,
            in_place=self.in_place,
        )
        self.seats[rank] = self.ask(body, m.Joined, peer=peer or b"rank%d" % rank).seat

    def send(self, body: m.Message, peer: bytes = PUBLISHER, call: int = 0) -> list[Action]:
        done = self.leader.on_message(self.now_s, peer, call, body)
        self.actions += done
        return done

    def call(self, body: m.Message, peer: bytes = PUBLISHER) -> int:
        self.calls += 1
        self.send(body, peer, self.calls)
        return self.calls

    def answer(self, call: int) -> m.Message | None:
        found = [a.body for a in self.actions if isinstance(a, SendReply) and a.call == call]
        assert len(found) <= 1, "a call is answered once"
        return found[0] if found else None

    def ask(self, body: m.Message, kind: type[B], peer: bytes = PUBLISHER) -> B:
        answer = self.answer(self.call(body, peer))
        assert isinstance(answer, kind), answer
        return answer

    def refused(self, body: m.Message) -> LiveWeightError:
        return self.ask(body, m.Refusal).fault.to_error()

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.actions += self.leader.on_time(self.now_s)

    def open(
        self, label: int = 1, *, verify: bool = True, publisher: str = "p", timeout_s: float = 10
    ) -> m.Open:
        lanes = offered(label)
        return m.Open(
            publisher=publisher,
            version=version_of(label),
            structure="s",
            digests=lanes_to_bytes(lanes),
            offer=OFFER,
            verify=verify,
            timeout_s=timeout_s,
        )

    def opened(self, label: int = 1, *, verify: bool = True) -> RoundId:
        round_id = self.ask(self.open(label, verify=verify), m.Opened).round
        assert round_id is not None
        return round_id

    def staged(self, round_id: RoundId, rank: int) -> None:
        self.send(m.Staged(round=round_id, rank=rank, size_bytes=10, seconds=0.1), b"rank%d" % rank)

    def verified(self, round_id: RoundId, rank: int, label: int, *, flip: bool = False) -> None:
        lanes = held(label, rank, self.world, flip=flip)
        self.send(m.Verified(round=round_id, rank=rank, lanes=lanes, seconds=0.1), b"rank%d" % rank)

    def dropped(self, round_id: RoundId, rank: int) -> None:
        self.send(m.ShadowDropped(round=round_id, rank=rank), b"rank%d" % rank)

    def whole(self, label: int = 1) -> RoundId:
        round_id = self.opened(label)
        for rank in range(self.world):
            self.staged(round_id, rank)
            self.verified(round_id, rank, label)
        return round_id

    def ready(self, label: int = 1) -> RoundId:
        round_id = self.whole(label)
        self.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
        return round_id

    def swapped(self, round_id: RoundId, rank: int, *, fault: bool = False) -> int:
        broken = Fault(code="LW-502", message="no memory", step="commit", rank=rank) if fault else None
        body = m.Swapped(
            boot=round_id.boot,
            epoch=round_id.epoch,
            rank=rank,
            seat=self.seats[rank],
            seconds=0.01,
            fault=broken,
        )
        return self.call(body, b"another channel of rank%d" % rank)

    def committed(self, label: int = 1) -> RoundId:
        round_id = self.ready(label)
        call = self.call(m.Commit(round=round_id, timeout_s=5))
        for rank in range(self.world):
            self.swapped(round_id, rank)
        assert isinstance(self.answer(call), m.Committed)
        return round_id

    @property
    def serving(self) -> str:
        assert isinstance(self.leader.state, ServingState)
        return str(self.leader.state.version)

    def emitted(self, kind: type[events.Event]) -> list[events.AnyEvent]:
        return [a.event for a in self.actions if isinstance(a, EmitEvent) and isinstance(a.event, kind)]


def test_a_commit_tells_what_every_rank_did() -> None:
    world = World()
    round_id = world.opened(1)
    for rank in range(2):
        staged = m.Staged(round=round_id, rank=rank, size_bytes=10 + rank, seconds=0.5 + rank)
        world.send(staged, b"rank%d" % rank)
        world.verified(round_id, rank, 1)
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
    commit = world.call(m.Commit(round=round_id, timeout_s=5))
    for rank in range(2):
        world.swapped(round_id, rank)
    answer = world.answer(commit)
    assert isinstance(answer, m.Committed)
    assert answer.ranks == tuple(
        RankTimes(rank=rank, staged_bytes=10 + rank, stage_s=0.5 + rank, verify_s=0.1, swap_s=0.01)
        for rank in range(2)
    )


def test_a_whole_round_commits_and_can_be_undone() -> None:
    world = World()
    world.committed(1)
    world.committed(2)
    assert world.serving == "2"
    call = world.call(m.Undo(publisher="p", timeout_s=5))
    decide = [a for a in world.actions if isinstance(a, PutDecision)][-1]
    assert decide.undo
    for rank in range(2):
        world.swapped(decide.round, rank)
    answer = world.answer(call)
    assert isinstance(answer, m.Committed)
    assert (str(answer.serving), answer.undo) == ("1", None)
    assert world.serving == "1"
    assert world.refused(m.Undo(publisher="p", timeout_s=5)).code == "LW-107"
    assert [e.outcome for e in world.emitted(events.RoundEnded) if isinstance(e, events.RoundEnded)] == [
        "committed",
        "committed",
        "undone",
    ]


def test_undo_without_a_version_to_go_back_to_is_refused() -> None:
    assert World().refused(m.Undo(publisher="p", timeout_s=5)).code == "LW-107"


def test_opening_gives_up_the_undo_of_the_round_before() -> None:
    world = World()
    world.committed(1)
    round_id = world.opened(2)
    world.ask(m.Abort(round=round_id, reason="no", wait_s=0), m.Aborted)
    assert world.refused(m.Undo(publisher="p", timeout_s=5)).code == "LW-107"


def test_a_round_without_verification_commits_on_staging_alone() -> None:
    world = World()
    round_id = world.opened(1, verify=False)
    for rank in range(2):
        world.staged(round_id, rank)
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)


def test_a_second_publisher_is_refused_with_the_holder_named() -> None:
    world = World()
    world.opened(1)
    error = world.refused(world.open(2, publisher="q"))
    assert error.code == "LW-106"
    assert "round of p" in str(error)


def test_what_is_installed_already_needs_no_round() -> None:
    world = World()
    world.committed(1)
    assert world.ask(world.open(1), m.Opened).round is None


def test_the_same_label_with_other_content_is_refused() -> None:
    world = World()
    world.committed(1)
    other = other_content(world)
    assert world.refused(other).code == "LW-104"
    restarted = msgspec.structs.replace(other, version=Version(run="another run", label=1))
    assert world.ask(restarted, m.Opened).round is not None


NORMS = OptionalGroup(name="norms", tensors=("norm",))
ONLY_W = Manifest(tensors=(W,))


def without_norms(world: World, label: int) -> m.Open:
    """A round whose offer leaves the norms out."""
    digest = f"{label:031x}f"  # of other names, so another one
    return msgspec.structs.replace(
        world.open(label),
        version=Version(run="run", label=f"{label} alone", digest=digest),
        structure="alone",
        digests=lanes_to_bytes(offered(label)[:1]),
    )


def commit_without_norms(world: World, label: int) -> RoundId:
    """The ranks keep the norms of version 0."""
    opened = world.ask(without_norms(world, label), m.Opened)
    assert opened.round is not None
    assert opened.kept == ("norms",)
    for rank in range(world.world):
        world.staged(opened.round, rank)
        lanes = held(label, rank, world.world)[:16] + held(0, rank, world.world)[16:]
        world.send(m.Verified(round=opened.round, rank=rank, lanes=lanes, seconds=0.1), b"rank%d" % rank)
    world.ask(m.RequestVote(round=opened.round, lease_s=5), m.Vote)
    call = world.call(m.Commit(round=opened.round, timeout_s=5))
    for rank in range(world.world):
        world.swapped(opened.round, rank)
    assert isinstance(world.answer(call), m.Committed)
    return opened.round


def kept(world: World) -> tuple[str, ...]:
    return world.ask(m.GetReplicaState(wait_s=0), m.ReplicaState).kept


def test_a_group_that_an_offer_may_leave_out_is_kept_and_not_compared() -> None:
    world = World(optional=(NORMS,))
    assert world.ask(m.GetReplicaState(wait_s=0), m.ReplicaState).optional == (NORMS,)
    world.ask(m.Describe(structure="alone", manifest=ONLY_W), m.Described)
    world.committed(1)
    assert kept(world) == ()
    commit_without_norms(world, 2)
    assert world.serving == "2 alone"
    assert kept(world) == ("norms",)
    orders = [a.body for a in world.actions if isinstance(a, NotifyRank) and isinstance(a.body, m.Stage)]
    assert [order.keep for order in orders] == [(), (), ("norm",), ("norm",)]
    again = world.ask(without_norms(world, 2), m.Opened)  # installed already
    assert (again.round, again.kept) == (None, ("norms",))
    call = world.call(m.Undo(publisher="p", timeout_s=5))
    decide = [a for a in world.actions if isinstance(a, PutDecision)][-1]
    for rank in range(2):
        world.swapped(decide.round, rank)
    assert isinstance(world.answer(call), m.Committed)
    assert kept(world) == ()
    assert [e.kept for e in world.emitted(events.RoundOpened) if isinstance(e, events.RoundOpened)] == [
        (),
        ("norms",),
    ]


def test_what_an_offer_without_a_group_does_bring_is_still_compared() -> None:
    world = World(optional=(NORMS,))
    world.ask(m.Describe(structure="alone", manifest=ONLY_W), m.Described)
    opened = world.ask(without_norms(world, 2), m.Opened)
    assert opened.round is not None
    for rank in range(2):
        world.staged(opened.round, rank)
        lanes = held(3, rank, 2)
        world.send(m.Verified(round=opened.round, rank=rank, lanes=lanes, seconds=0.1), b"rank%d" % rank)
    (aborted,) = world.emitted(events.RoundGivenUp)
    assert isinstance(aborted, events.RoundGivenUp)
    assert aborted.code == "LW-401"
    assert "w" in aborted.reason
    assert "norm" not in aborted.reason


def test_ranks_whose_copies_of_a_kept_tensor_differ_do_not_commit() -> None:
    world = World(optional=(NORMS,))
    world.ask(m.Describe(structure="alone", manifest=ONLY_W), m.Described)
    opened = world.ask(without_norms(world, 2), m.Opened)
    assert opened.round is not None
    for rank in range(2):
        world.staged(opened.round, rank)
        lanes = held(2, rank, 2)[:16] + held(rank, rank, 2)[16:]
        world.send(m.Verified(round=opened.round, rank=rank, lanes=lanes, seconds=0.1), b"rank%d" % rank)
    (aborted,) = world.emitted(events.RoundGivenUp)
    assert isinstance(aborted, events.RoundGivenUp)
    assert "norm" in aborted.reason


def test_without_such_a_group_an_offer_that_leaves_it_out_is_refused_by_name() -> None:
    error = World().refused(m.Describe(structure="alone", manifest=ONLY_W))
    assert (error.code, "norm missing" in str(error)) == ("LW-101", True)


def test_a_part_of_a_group_is_refused_with_the_names_that_are_missing() -> None:
    both = OptionalGroup(name="all", tensors=("w", "norm"))
    error = World(optional=(both,)).refused(m.Describe(structure="alone", manifest=ONLY_W))
    assert (error.code, "norm missing" in str(error)) == ("LW-101", True)


def test_ranks_that_disagree_about_what_may_be_left_out_are_not_let_in() -> None:
    leader = Leader(replica="engine", boot="boot", world=2)
    for rank, (optional, code) in enumerate([((NORMS,), None), ((), "LW-103")]):
        body = m.Join(rank=rank, pid=1, layout=layout_of(rank, 2), serving=None, optional=optional)
        (action,) = leader.on_message(0.0, b"rank%d" % rank, 1, body)
        assert isinstance(action, SendReply)
        assert (action.body.fault.code if isinstance(action.body, m.Refusal) else None) == code


def test_a_group_of_tensors_that_nobody_owns_is_refused() -> None:
    strange = OptionalGroup(name="strange", tensors=("nobody's",))
    leader = Leader(replica="engine", boot="boot", world=1)
    body = m.Join(rank=0, pid=1, layout=layout_of(0, 1), serving=None, optional=(strange,))
    (action,) = leader.on_message(0.0, b"rank0", 1, body)
    assert isinstance(action, SendReply)
    assert isinstance(action.body, m.Refusal)
    assert "nobody's" in action.body.fault.message


def other_content(world: World) -> m.Open:
    """Label 1 of the same run, with the content of version 2."""
    return msgspec.structs.replace(world.open(2), version=Version(run="run", label=1))


def test_a_failed_round_leaves_its_label_free_for_other_content() -> None:
    world = World()
    round_id = world.ready(1)
    world.pass_time(5)  # its lease is over
    again = world.ask(other_content(world), m.Opened).round
    assert again is not None
    assert again != round_id


def test_a_restarted_leader_learns_from_its_ranks_what_a_label_stands_for() -> None:
    world = World()
    for rank in range(2):
        world.join(rank, version_of(1))
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    assert world.refused(other_content(world)).code == "LW-104"
    assert world.ask(world.open(1), m.Opened).round is None


def test_a_round_that_stood_in_for_a_digest_binds_no_label() -> None:
    world = World()
    for rank in range(2):
        world.join(rank, Version(run="run", label=1, digest="an older boot/3"))
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    assert world.ask(world.open(1), m.Opened).round is not None


def test_a_process_that_was_replaced_has_no_say_any_more() -> None:
    world = World()
    former = world.seats[1]
    world.join(1, peer=b"successor")
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    round_id = world.opened(1)
    world.staged(round_id, 0)
    world.verified(round_id, 0, 1)
    world.staged(round_id, 1)
    world.verified(round_id, 1, 1)
    fault = Fault(code="LW-502", message="no memory", step="stage", rank=1)
    world.send(m.StagingFailed(round=round_id, fault=fault), b"rank1")
    asked = world.ask(m.WaitFor(round=round_id, until="open", wait_s=1), m.Progress)
    assert (asked.phase, asked.missing, asked.readers) == ("open", (1,), (1,))
    world.send(m.Staged(round=round_id, rank=1, size_bytes=10, seconds=0.1), b"successor")
    lanes = held(1, 1, 2)
    world.send(m.Verified(round=round_id, rank=1, lanes=lanes, seconds=0.1), b"successor")
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
    commit = world.call(m.Commit(round=round_id, timeout_s=5))
    world.swapped(round_id, 0)
    mine, world.seats[1] = world.seats[1], former
    assert isinstance(world.answer(world.swapped(round_id, 1, fault=True)), m.Refusal)
    assert world.answer(commit) is None
    world.seats[1] = mine
    world.swapped(round_id, 1)
    assert isinstance(world.answer(commit), m.Committed)


def test_a_dropped_of_a_process_that_was_replaced_releases_nobody() -> None:
    world = World()
    world.join(1, peer=b"successor")
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    round_id = world.opened(1)
    abort = world.call(m.Abort(round=round_id, reason="no", wait_s=1))
    world.dropped(round_id, 0)
    world.dropped(round_id, 1)
    assert world.answer(abort) is None
    world.send(m.ShadowDropped(round=round_id, rank=1), b"successor")
    assert isinstance(world.answer(abort), m.Aborted)


def test_a_replica_that_waits_for_a_rank_says_that_a_retry_makes_sense() -> None:
    world = World()
    world.actions += world.leader.on_lost(world.now_s, 1)
    for body in (world.open(1), m.Undo(publisher="p", timeout_s=5)):
        error = world.refused(body)
        assert (error.code, error.retryable, "rank 1" in str(error)) == ("LW-108", True, True)
    asked = world.call(m.GetReplicaState(wait_s=1))
    world.pass_time(1)
    answer = world.answer(asked)
    assert isinstance(answer, m.Refusal)
    assert answer.fault.to_error().retryable


def test_a_flipped_bit_in_one_shadow_is_named_and_nothing_changes() -> None:
    world = World()
    world.committed(1)
    round_id = world.opened(2)
    waiting = world.call(m.WaitFor(round=round_id, until="verified", wait_s=10))
    for rank in range(2):
        world.staged(round_id, rank)
        world.verified(round_id, rank, 2, flip=rank == 1)
    answer = world.answer(waiting)
    assert isinstance(answer, m.Progress)
    assert answer.phase == "failed"
    assert answer.fault is not None
    assert (answer.fault.code, "norm" in answer.fault.message) == ("LW-401", True)
    assert world.serving == "1"
    assert [
        a.rank for a in world.actions if isinstance(a, NotifyRank) and isinstance(a.body, m.DropShadow)
    ] == [0, 1]


def test_a_wrong_version_on_every_rank_is_noticed_too() -> None:
    world = World()
    round_id = world.opened(2)
    for rank in range(2):
        world.staged(round_id, rank)
        world.verified(round_id, rank, 3)
    assert world.serving == "None"
    assert world.refused(m.RequestVote(round=round_id, lease_s=5)).code == "LW-107"


def test_a_rank_that_does_not_stage_is_named_at_the_deadline() -> None:
    world = World()
    round_id = world.opened(1)
    waiting = world.call(m.WaitFor(round=round_id, until="staged", wait_s=60))
    world.staged(round_id, 0)
    world.pass_time(9.9)
    assert world.answer(waiting) is None
    world.pass_time(0.2)
    answer = world.answer(waiting)
    assert isinstance(answer, m.Progress)
    assert answer.fault is not None
    assert (answer.fault.rank, answer.fault.step, answer.fault.code) == (1, "stage", "LW-301")
    assert answer.readers == (1,)


def test_a_wait_ends_with_the_progress_so_far() -> None:
    world = World()
    round_id = world.opened(1)
    waiting = world.call(m.WaitFor(round=round_id, until="staged", wait_s=1))
    world.staged(round_id, 1)
    world.pass_time(1)
    answer = world.answer(waiting)
    assert isinstance(answer, m.Progress)
    assert (answer.phase, answer.missing, answer.fault) == ("open", (0,), None)


def test_a_lease_that_ends_aborts_and_a_later_commit_is_refused() -> None:
    world = World()
    round_id = world.ready(1)
    world.pass_time(5)
    assert world.refused(m.Commit(round=round_id, timeout_s=5)).code == "LW-107"
    assert not [a for a in world.actions if isinstance(a, PutDecision)]
    assert len(world.emitted(events.LeaseExpired)) == 1


def test_a_commit_that_is_read_after_its_lease_is_late() -> None:
    world = World()
    round_id = world.ready(1)
    world.now_s += 5  # the leader's thread was delayed and reads its messages first
    assert world.refused(m.Commit(round=round_id, timeout_s=5)).code == "LW-107"
    assert not [a for a in world.actions if isinstance(a, PutDecision)]


def test_a_commit_of_an_old_epoch_has_no_effect() -> None:
    world = World()
    old = world.ready(1)
    world.ask(m.Abort(round=old, reason="changed my mind", wait_s=0), m.Aborted)
    new = world.ready(2)
    assert world.refused(m.Commit(round=old, timeout_s=5)).code == "LW-107"
    restarted = RoundId(boot="another boot", epoch=new.epoch, publisher="p")
    assert world.refused(m.Commit(round=restarted, timeout_s=5)).code == "LW-107"
    stranger = RoundId(boot="boot", epoch=new.epoch, publisher="q")
    assert world.refused(m.Commit(round=stranger, timeout_s=5)).code == "LW-107"
    assert not [a for a in world.actions if isinstance(a, PutDecision)]


def test_a_vote_before_verification_is_refused() -> None:
    world = World()
    round_id = world.opened(1)
    for rank in range(2):
        world.staged(round_id, rank)
    assert world.refused(m.RequestVote(round=round_id, lease_s=5)).code == "LW-107"


def test_one_rank_that_cannot_swap_sends_all_back() -> None:
    world = World()
    world.committed(1)
    round_id = world.ready(2)
    commit = world.call(m.Commit(round=round_id, timeout_s=5))
    first = world.swapped(round_id, 0)
    second = world.swapped(round_id, 1, fault=True)
    for call in (first, second):
        settled = world.answer(call)
        assert isinstance(settled, m.Settled)
        assert (settled.keep, str(settled.serving)) == (False, "1")
    refusal = world.answer(commit)
    assert isinstance(refusal, m.Refusal)
    assert refusal.fault.rank == 1


def test_a_boundary_that_comes_too_late_is_told_to_go_back() -> None:
    world = World()
    world.committed(1)
    round_id = world.ready(2)
    commit = world.call(m.Commit(round=round_id, timeout_s=5))
    first = world.swapped(round_id, 0)
    world.pass_time(5)
    assert isinstance(world.answer(commit), m.Refusal)
    assert [a for a in world.actions if isinstance(a, WithdrawDecision)]
    late = world.swapped(round_id, 1)
    for call in (first, late):
        settled = world.answer(call)
        assert isinstance(settled, m.Settled)
        assert not settled.keep
    assert world.serving == "1"


def test_a_rank_that_asks_again_after_the_outcome_hears_the_same() -> None:
    world = World()
    round_id = world.committed(1)
    settled = world.answer(world.swapped(round_id, 0))
    assert isinstance(settled, m.Settled)
    assert settled.keep


def test_a_commit_cannot_be_aborted_half_way() -> None:
    world = World()
    round_id = world.ready(1)
    world.call(m.Commit(round=round_id, timeout_s=5))
    assert world.refused(m.Abort(round=round_id, reason="no", wait_s=0)).code == "LW-107"


def test_an_abort_is_answered_when_nobody_reads_any_more() -> None:
    world = World()
    round_id = world.opened(1)
    abort = world.call(m.Abort(round=round_id, reason="no", wait_s=10))
    assert world.answer(abort) is None
    world.dropped(round_id, 0)
    world.dropped(round_id, 1)
    answer = world.answer(abort)
    assert isinstance(answer, m.Aborted)
    assert answer.readers == ()


def test_a_rank_that_lags_is_named_when_the_wait_for_it_is_over() -> None:
    world = World()
    round_id = world.opened(1)
    abort = world.call(m.Abort(round=round_id, reason="no", wait_s=1))
    world.dropped(round_id, 0)
    world.pass_time(1)
    answer = world.answer(abort)
    assert isinstance(answer, m.Aborted)
    assert answer.readers == (1,)


def test_a_lost_rank_fails_the_round_at_once_and_its_successor_completes_the_replica() -> None:
    world = World()
    world.committed(1)
    round_id = world.opened(2)
    waiting = world.call(m.WaitFor(round=round_id, until="staged", wait_s=60))
    world.actions += world.leader.on_lost(world.now_s, 1)
    answer = world.answer(waiting)
    assert isinstance(answer, m.Progress)
    assert answer.fault is not None
    assert (answer.fault.rank, answer.fault.code) == (1, "LW-205")
    assert "rank 1" in str(world.refused(world.open(3)))
    asked = world.call(m.GetReplicaState(wait_s=10))
    assert world.answer(asked) is None
    world.join(1)
    replica_state = world.answer(asked)
    assert isinstance(replica_state, m.ReplicaState)
    assert replica_state.serving is None  # rank 0 holds version 1, its new companion something unknown
    assert world.refused(world.open(3)).code == "LW-102"  # described anew first
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    world.committed(3)


@pytest.mark.parametrize("voted", [False, True], ids=["at the vote", "at the commit"])
def test_a_publisher_that_did_not_hear_of_a_lost_rank_is_told_its_name(voted: bool) -> None:
    world = World()
    world.committed(1)
    round_id = world.ready(2) if voted else world.whole(2)
    world.actions += world.leader.on_lost(world.now_s, 1)
    asked = m.Commit(round=round_id, timeout_s=5) if voted else m.RequestVote(round=round_id, lease_s=5)
    fault = world.ask(asked, m.Refusal).fault
    assert (fault.rank, fault.code) == (1, "LW-205")


def test_a_successor_that_claims_an_old_version_does_not_make_the_replica_seem_whole() -> None:
    world = World()
    one = version_of(1)
    for rank in range(2):
        world.join(rank, one)
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    world.committed(2)
    world.actions += world.leader.on_lost(world.now_s, 1)
    world.join(1, one)
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    assert world.ask(m.GetReplicaState(wait_s=1), m.ReplicaState).serving is None
    assert world.ask(world.open(1), m.Opened).round is not None


def test_a_refused_join_changes_nothing() -> None:
    world = World()
    round_id = world.ready(1)
    commit = world.call(m.Commit(round=round_id, timeout_s=5))
    for body in (
        m.Join(rank=7, pid=1, layout=layout_of(0, 2), serving=None),
        m.Join(rank=1, pid=1, layout=layout_of(0, 1), serving=None),
    ):
        assert world.refused(body).code == "LW-103"
    world.actions += world.leader.on_lost(world.now_s, 7)
    assert world.answer(commit) is None
    for rank in range(2):
        world.swapped(round_id, rank)
    assert isinstance(world.answer(commit), m.Committed)


def test_the_last_commit_is_remembered_however_many_rounds_fail_after_it() -> None:
    world = World()
    kept = world.committed(1)
    for label in range(2, 90):
        world.ask(m.Abort(round=world.opened(label), reason="no", wait_s=0), m.Aborted)
    settled = world.answer(world.swapped(kept, 1))
    assert isinstance(settled, m.Settled)
    assert settled.keep


def test_an_outcome_that_nobody_remembers_is_not_guessed() -> None:
    world = World()
    stranger = RoundId(boot="another boot", epoch=1, publisher="p")
    assert isinstance(world.answer(world.swapped(stranger, 1)), m.Refusal)


def test_a_rank_that_dies_after_an_abort_reads_no_more() -> None:
    world = World()
    round_id = world.opened(1)
    abort = world.call(m.Abort(round=round_id, reason="no", wait_s=100))
    world.dropped(round_id, 0)
    world.actions += world.leader.on_lost(world.now_s, 1)
    answer = world.answer(abort)
    assert isinstance(answer, m.Aborted)
    assert answer.readers == ()


def test_the_round_stands_in_for_a_digest_that_is_not_known() -> None:
    world = World()
    plain = msgspec.structs.replace(
        world.open(5, verify=False), digests=None, version=Version(run="run", label=5)
    )
    installed = []
    for _ in range(2):
        opened = world.ask(plain, m.Opened)
        assert opened.round is not None  # content unknown: never taken for what is installed already
        for rank in range(2):
            world.staged(opened.round, rank)
        world.ask(m.RequestVote(round=opened.round, lease_s=5), m.Vote)
        call = world.call(m.Commit(round=opened.round, timeout_s=5))
        for rank in range(2):
            world.swapped(opened.round, rank)
        committed = world.answer(call)
        assert isinstance(committed, m.Committed)
        installed.append(committed.serving)
    assert installed[0] != installed[1]


def test_a_refusal_says_what_serves() -> None:
    world = World()
    world.committed(1)
    world.opened(2)
    assert str(world.ask(world.open(3, publisher="q"), m.Refusal).serving) == "1"


def test_ranks_whose_regions_overlap_in_part_cannot_join() -> None:
    leader = Leader(replica="engine", boot="boot", world=2)
    for rank, layout in enumerate([layout_of(0, 1), layout_of(1, 2)]):
        body = m.Join(rank=rank, pid=1, layout=layout, serving=None)
        actions = leader.on_message(0.0, b"r", 1, body)
    reply = actions[-1]
    assert isinstance(reply, SendReply)
    assert isinstance(reply.body, m.Refusal)
    assert reply.body.fault.code == "LW-103"


def test_a_manifest_that_does_not_fit_is_refused_with_the_names() -> None:
    other = Manifest(tensors=(W, TensorSpec(name="bias", dtype=DType.FLOAT32, shape=(3,))))
    error = World().refused(m.Describe(structure="t", manifest=other))
    assert error.code == "LW-101"
    assert "norm missing" in str(error)
    assert "bias unexpected" in str(error)


@pytest.mark.parametrize("lanes", [b"", b"x" * 31])
def test_digests_of_the_wrong_number_are_refused(lanes: bytes) -> None:
    world = World()
    round_id = world.opened(1)
    for rank in range(2):
        world.staged(round_id, rank)
    world.send(m.Verified(round=round_id, rank=0, lanes=lanes, seconds=0.0), b"rank0")
    assert len(world.emitted(events.PeerRefused)) == 1
    assert world.refused(m.RequestVote(round=round_id, lease_s=5)).code == "LW-107"


class Interleavings(RuleBasedStateMachine):
    """Any order of messages, also late, doubled and foreign ones: ranks never end up with different outcomes of one round."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.rounds: list[tuple[RoundId, int]] = []
        self.asked: list[int] = []
        self.label = 0
        self.swaps: dict[int, list[int]] = {}

    @rule()
    def open(self) -> None:
        self.label += 1
        answer = self.world.answer(self.world.call(self.world.open(self.label)))
        if isinstance(answer, m.Opened) and answer.round is not None:
            self.rounds.append((answer.round, self.label))

    @precondition(lambda self: self.rounds)
    @rule(data=st.data(), rank=st.integers(0, 1))
    def stage(self, data: st.DataObject, rank: int) -> None:
        self.world.staged(data.draw(st.sampled_from(self.rounds))[0], rank)

    @precondition(lambda self: self.rounds)
    @rule(data=st.data(), rank=st.integers(0, 1), flip=st.sampled_from([False, False, False, True]))
    def verify(self, data: st.DataObject, rank: int, flip: bool) -> None:
        round_id, label = data.draw(st.sampled_from(self.rounds))
        self.world.verified(round_id, rank, label, flip=flip)

    @precondition(lambda self: self.rounds)
    @rule(data=st.data(), kind=st.sampled_from(["ask", "commit", "abort", "await"]))
    def decide(self, data: st.DataObject, kind: str) -> None:
        round_id, _ = data.draw(st.sampled_from(self.rounds))
        body: m.Message
        match kind:
            case "ask":
                body = m.RequestVote(round=round_id, lease_s=5)
            case "commit":
                body = m.Commit(round=round_id, timeout_s=5)
            case "abort":
                body = m.Abort(round=round_id, reason="no", wait_s=3)
            case _:
                body = m.WaitFor(round=round_id, until="verified", wait_s=3)
        self.asked.append(self.world.call(body))

    @rule()
    def undo(self) -> None:
        self.asked.append(self.world.call(m.Undo(publisher="p", timeout_s=5)))

    @precondition(lambda self: self.decided())
    @rule(data=st.data(), rank=st.integers(0, 1), fault=st.sampled_from([False, False, True]))
    def swap(self, data: st.DataObject, rank: int, fault: bool) -> None:
        round_id = data.draw(st.sampled_from(self.decided()))
        call = self.world.swapped(round_id, rank, fault=fault)
        self.asked.append(call)
        self.swaps.setdefault(round_id.epoch, []).append(call)

    def decided(self) -> list[RoundId]:
        return [a.round for a in self.world.actions if isinstance(a, PutDecision)]

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(rank=st.integers(0, 1))
    def replace(self, rank: int) -> None:
        self.world.join(rank)
        self.world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)

    @invariant()
    def a_round_has_one_outcome(self) -> None:
        ended = [e for e in self.world.emitted(events.RoundEnded) if isinstance(e, events.RoundEnded)]
        assert len({e.round for e in ended}) == len(ended)

    @invariant()
    def all_ranks_hear_the_same_outcome(self) -> None:
        for calls in self.swaps.values():
            answers = [self.world.answer(call) for call in calls]
            assert len({answer.keep for answer in answers if isinstance(answer, m.Settled)}) <= 1

    def teardown(self) -> None:
        """Given time alone, every call is answered."""
        self.world.pass_time(100)
        assert all(self.world.answer(call) is not None for call in self.asked)
        assert not self.world.leader.needs_ranks


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
