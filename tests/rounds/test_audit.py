"""Audits, from messages and time alone: what counts as one state of all ranks, what differs on which rank, and which rank is missing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.plan.digest_sums import lanes_from_bytes, lanes_to_bytes
from liveweight.rounds.leader.round_record import NotifyRank, PutDecision
from liveweight.spec.digest import to_hex
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import RoundId
from tests.rounds.test_leader import MANIFEST, World, held, layout_of, offered

START = Version(run="start", label="initial", digest=None)


def manifest_of(label: int) -> Manifest:
    """The tensors of a version, with their digests."""
    return MANIFEST.with_digests([to_hex(lanes) for lanes in offered(label)])


def orders(world: World) -> list[tuple[int, m.DigestLive]]:
    """The digest orders to ranks so far."""
    return [
        (a.rank, a.body)
        for a in world.actions
        if isinstance(a, NotifyRank) and isinstance(a.body, m.DigestLive)
    ]


def digested(world: World, rank: int, lanes: bytes | None, *, audit: int | None = None) -> None:
    """A rank's answer to the newest order, or to an older one."""
    number = orders(world)[-1][1].audit if audit is None else audit
    body = m.LiveDigests(audit=number, rank=rank, lanes=lanes, seconds=0.1 + rank)
    world.send(body, b"rank%d" % rank)


def verdict(world: World, call: int) -> m.Verdict:
    answer = world.answer(call)
    assert isinstance(answer, m.Verdict), answer
    return answer


def refusal(world: World, call: int) -> m.Refusal:
    answer = world.answer(call)
    assert isinstance(answer, m.Refusal), answer
    return answer


def flipped(label: int, rank: int, placement: int) -> bytes:
    """What a rank of two holds of a version, one bit of one placement's digest apart."""
    lanes = lanes_from_bytes(held(label, rank, 2), 2).copy()
    lanes[placement, 0] ^= 1
    return lanes_to_bytes(lanes)


def content_world(label: int = 1) -> World:
    """Two ranks that joined with a version whose content they know."""
    world = World()
    version = msgspec.structs.replace(START, digest=manifest_of(label).digest())
    for rank in range(2):
        body = m.Join(
            rank=rank,
            pid=100 + rank,
            layout=layout_of(rank, 2),
            serving=version,
            lanes=held(label, rank, 2),
            manifest=manifest_of(label) if rank == 0 else None,
        )
        world.seats[rank] = world.ask(body, m.Joined, peer=b"rank%d" % rank).seat
    world.ask(m.Describe(structure="s", manifest=MANIFEST), m.Described)
    return world


def commit(world: World, label: int) -> None:
    """A round whose version has the digest of its content."""
    body = world.open(label)
    version = Version(run="run", label=label, digest=manifest_of(label).digest())
    round_id = world.ask(msgspec.structs.replace(body, version=version), m.Opened).round
    assert round_id is not None
    for rank in range(world.world):
        world.staged(round_id, rank)
        world.verified(round_id, rank, label)
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
    world.call(m.Commit(round=round_id, timeout_s=5))
    for rank in range(world.world):
        world.swapped(round_id, rank)
    assert world.serving == str(label)


def undo(world: World) -> None:
    world.call(m.Undo(publisher="p", timeout_s=5))
    decide = [a for a in world.actions if isinstance(a, PutDecision)][-1]
    for rank in range(world.world):
        world.swapped(decide.round, rank)


def verified(world: World, label: int, **asked: object) -> m.Verdict:
    """Verify, while all ranks hold that version."""
    call = world.call(m.Verify(**asked))  # type: ignore[arg-type]
    for rank in range(world.world):
        digested(world, rank, held(label, rank, world.world))
    return verdict(world, call)


def test_what_is_installed_is_found_with_the_digest_of_its_source() -> None:
    world = World()
    commit(world, 1)
    found = verified(world, 1)
    assert (found.match, found.differing, found.mismatches) == (True, 0, ())
    assert found.digest == manifest_of(1).digest()
    assert found.found == found.serving == Version(run="run", label=1, digest=found.digest)
    assert (found.tensors, found.compared, found.seconds) == (2, 2, (0.1, 1.1))


def test_after_an_undo_it_is_the_version_before() -> None:
    world = content_world(1)
    commit(world, 2)
    assert verified(world, 2).match is True
    undo(world)
    back = verified(world, 1)
    assert (back.match, str(back.found), back.digest) == (True, "initial", manifest_of(1).digest())
    other = verified(world, 2)  # the ranks hold what was undone, whatever the leader told them
    assert (other.match, str(other.found), str(other.serving)) == (False, "2", "initial")


@pytest.mark.parametrize("how", ["round", "join", "round without verification"])
@pytest.mark.parametrize(("placement", "name"), [(0, "w"), (1, "norm")])
def test_a_flipped_bit_is_named_with_its_rank(how: str, placement: int, name: str) -> None:
    world = content_world(1) if how == "join" else World()
    if how == "round":
        commit(world, 1)
    elif how == "round without verification":
        round_id = world.opened(1, verify=False)
        for rank in range(2):
            world.staged(round_id, rank)
        world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
        world.call(m.Commit(round=round_id, timeout_s=5))
        for rank in range(2):
            world.swapped(round_id, rank)
    call = world.call(m.Verify())
    digested(world, 0, held(1, 0, 2))
    digested(world, 1, flipped(1, 1, placement))
    found = verdict(world, call)
    assert (found.match, found.found, found.differing) == (False, None, 1)
    assert found.digest != manifest_of(1).digest()
    # Of a tensor that is split, only its ranks' own digests tell which of them differs; a round without verification has none.
    ranks = () if how == "round without verification" and name == "w" else (1,)
    assert [(one.name, one.ranks) for one in found.mismatches] == [(name, ranks)]


def test_only_the_tensors_that_are_named_are_digested_and_compared() -> None:
    world = World()
    commit(world, 1)
    call = world.call(m.Verify(names=("norm",), listed=True))
    assert [order.names for _, order in orders(world)] == [("norm",), ("norm",)]
    for rank in range(2):
        lanes = lanes_from_bytes(held(1, rank, 2), 2).copy()
        lanes[0] = 0
        digested(world, rank, lanes_to_bytes(lanes))
    found = verdict(world, call)
    assert (found.match, found.tensors, found.compared, found.digest, found.found) == (True, 1, 1, None, None)
    assert found.manifest == Manifest(tensors=(manifest_of(1).tensors[1],))


def test_names_and_manifests_that_do_not_fit_are_refused_with_the_names() -> None:
    world = World()
    other = msgspec.structs.replace(manifest_of(1).tensors[0], shape=(3, 4))
    strange = msgspec.structs.replace(manifest_of(1).tensors[0], name="strange")
    asked = {
        "LW-101 refused: x unexpected, y unexpected": m.Verify(names=("x", "norm", "y")),
        "LW-101 refused: strange unexpected": m.Verify(manifest=Manifest(tensors=(strange,))),
        "LW-101 refused: w is float32[4, 3] here, and float32[3, 4] in the manifest": m.Verify(
            manifest=Manifest(tensors=(other,))
        ),
        "LW-101 refused: norm is asked for and not in the manifest": m.Verify(
            manifest=Manifest(tensors=manifest_of(1).tensors[:1]), names=("norm",)
        ),
        "LW-102 w has no digest to compare with": m.Verify(manifest=MANIFEST),
    }
    for text, body in asked.items():
        error = world.refused(body)
        assert f"{error.code} {error}" == text
    assert orders(world) == []


def test_a_manifest_that_is_given_counts_in_place_of_what_is_installed() -> None:
    world = World()
    commit(world, 1)
    assert verified(world, 1, manifest=manifest_of(1)).match is True
    other = verified(world, 1, manifest=manifest_of(2))
    assert (other.match, other.differing, str(other.found)) == (False, 2, "1")
    part = Manifest(tensors=manifest_of(1).tensors[1:])
    some = verified(world, 1, manifest=part)
    assert (some.match, some.tensors, some.digest) == (True, 1, part.digest())


def test_weights_that_nobody_described_have_a_digest_and_no_match() -> None:
    found = verified(World(), 1)
    assert (found.match, found.serving, found.found, found.compared) == (None, None, None, 0)
    assert found.digest == manifest_of(1).digest()


def test_copies_that_disagree_are_a_mismatch_also_where_nothing_is_known() -> None:
    world = World()
    call = world.call(m.Verify(listed=True))
    digested(world, 0, held(1, 0, 2))
    digested(world, 1, flipped(1, 1, 1))
    found = verdict(world, call)
    assert (found.match, [one.name for one in found.mismatches]) == (False, ["norm"])
    assert found.manifest is not None
    assert [spec.digest is None for spec in found.manifest] == [False, True]


def test_a_swap_while_ranks_digest_begins_the_audit_again_and_a_second_one_ends_it() -> None:
    world = World()
    commit(world, 1)
    once, twice = world.call(m.Verify()), world.call(m.Verify())
    first = [order.audit for _, order in orders(world)]
    assert len(set(first)) == 2
    for audit in sorted(set(first)):
        digested(world, 0, held(1, 0, 2), audit=audit)
    commit(world, 2)
    for audit in sorted(set(first)):
        digested(world, 1, held(2, 1, 2), audit=audit)  # together they would be a mixture
    assert (world.answer(once), world.answer(twice)) == (None, None)
    again = sorted({order.audit for _, order in orders(world)} - set(first))
    assert len(again) == 2
    digested(world, 0, held(1, 0, 2), audit=first[0])  # late: it has no effect
    for rank in range(2):
        digested(world, rank, held(2, rank, 2), audit=again[0])
    assert (verdict(world, once).match, str(verdict(world, once).found)) == (True, "2")
    digested(world, 0, None, audit=again[1])  # its weights were swapped while it read
    error = refusal(world, twice).fault.to_error()
    assert (error.code, error.retryable, str(refusal(world, twice).serving)) == ("LW-109", True, "2")


def test_an_audit_waits_for_a_swap_that_is_under_way() -> None:
    world = World()
    round_id = world.ready(1)
    world.call(m.Commit(round=round_id, timeout_s=5))
    call = world.call(m.Verify(timeout_s=3))
    late = world.call(m.Verify(timeout_s=1))
    assert orders(world) == []
    world.pass_time(2)
    assert "a swap of weights to end" in str(refusal(world, late).fault.to_error())
    for rank in range(2):
        world.swapped(round_id, rank)
    assert len(orders(world)) == 2
    assert orders(world)[0][1].timeout_s == pytest.approx(1)
    for rank in range(2):
        digested(world, rank, held(1, rank, 2))
    assert verdict(world, call).match is True


def test_during_a_round_what_is_live_is_verified_and_the_round_goes_on() -> None:
    world = World()
    commit(world, 1)
    round_id = world.opened(2)
    world.staged(round_id, 0)
    found = verified(world, 1)
    assert (found.match, str(found.found)) == (True, "1")
    world.staged(round_id, 1)
    for rank in range(2):
        world.verified(round_id, rank, 2)
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)


def test_ranks_that_do_not_answer_in_time_are_named() -> None:
    world = World()
    one, both = world.call(m.Verify(timeout_s=2)), world.call(m.Verify(timeout_s=2))
    digested(world, 0, held(1, 0, 2), audit=orders(world)[0][1].audit)
    assert world.leader.needs_ranks
    world.pass_time(1)
    assert world.answer(one) is None
    world.pass_time(1)
    late = refusal(world, one).fault
    assert (late.code, late.rank, late.step, late.waited_s) == ("LW-301", 1, "verify", 2.0)
    assert "rank 1 to digest its weights" in late.message
    assert "rank 0, 1 to digest" in refusal(world, both).fault.message
    assert not world.leader.needs_ranks


def test_a_dead_rank_ends_an_audit_by_name_and_its_predecessor_has_no_say() -> None:
    world = World()
    commit(world, 1)
    call = world.call(m.Verify())
    world.actions += world.leader.on_lost(world.now_s, 1)
    fault = refusal(world, call).fault
    assert (fault.code, fault.rank) == ("LW-205", 1)
    assert "rank 1 (process 101) is gone" in fault.message
    assert world.refused(m.Verify()).code == "LW-108"
    world.join(1, serving=Version(run="run", label=1, digest=manifest_of(1).digest()), peer=b"another")
    again = world.call(m.Verify())
    digested(world, 0, held(1, 0, 2))
    digested(world, 1, held(1, 1, 2))  # from the peer that was replaced
    assert world.answer(again) is None
    body = m.LiveDigests(audit=orders(world)[-1][1].audit, rank=1, lanes=held(1, 1, 2), seconds=0.1)
    world.send(body, b"another")
    assert verdict(world, again).match is True  # known by the digest of the whole alone


def test_what_a_rank_says_of_its_failure_reaches_the_caller() -> None:
    world = World()
    call = world.call(m.Verify())
    fault = world.refused(m.Verify(names=("x",)))
    broken = m.LiveDigests(
        audit=orders(world)[-1][1].audit,
        rank=1,
        lanes=None,
        seconds=0.0,
        fault=msgspec.structs.replace(
            refusal(world, world.calls).fault, code="LW-107", message="in doubt", rank=1
        ),
    )
    assert fault.code == "LW-101"
    world.send(broken, b"rank1")
    assert (refusal(world, call).fault.message, refusal(world, call).fault.rank) == ("in doubt", 1)


STEPS = ("verify", "commit", "swap 0", "swap 1", "read 0", "read 1", "send 0", "send 1")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=10, max_size=60))
def test_no_order_of_events_gives_a_verdict_on_a_mixture(steps: list[str]) -> None:
    world = World()
    commit(world, 1)
    label, committing = 1, None
    holds, swaps = [1, 1], [0, 0]
    readings: list[tuple[int, int, int] | None] = [None, None]
    calls: list[int] = []
    for step in steps:
        what, _, number = step.partition(" ")
        rank = int(number or 0)
        match what:
            case "verify" if not calls or world.answer(calls[-1]) is not None:
                calls.append(world.call(m.Verify()))
            case "commit" if committing is None:
                label += 1
                committing = ready(world, label)
                world.call(m.Commit(round=committing, timeout_s=5))
            case "swap" if committing is not None and holds[rank] != label:
                holds[rank], swaps[rank] = label, swaps[rank] + 1
                world.swapped(committing, rank)
                committing = None if holds == [label, label] else committing
            case "read" if orders(world) and (committing is None or holds[rank] != label):
                readings[rank] = (orders(world)[-1][1].audit, holds[rank], swaps[rank])
            case "send" if (reading := readings[rank]) is not None:
                audit, content, count = reading
                lanes = held(content, rank, 2) if count == swaps[rank] else None
                digested(world, rank, lanes, audit=audit)
                readings[rank] = None
            case _:
                pass
    for call in calls:
        answer = world.answer(call)
        if isinstance(answer, m.Verdict):
            assert (answer.match, answer.found) == (True, answer.serving)
        else:
            assert answer is None or (isinstance(answer, m.Refusal) and answer.fault.code == "LW-109")


def ready(world: World, label: int) -> RoundId:
    """A round that has voted, whose version has the digest of its content."""
    version = Version(run="run", label=label, digest=manifest_of(label).digest())
    round_id = world.ask(msgspec.structs.replace(world.open(label), version=version), m.Opened).round
    assert round_id is not None
    for rank in range(world.world):
        world.staged(round_id, rank)
        world.verified(round_id, rank, label)
    world.ask(m.RequestVote(round=round_id, lease_s=5), m.Vote)
    return round_id


def test_the_listing_is_bounded_and_the_count_is_not() -> None:
    world = World()
    commit(world, 1)
    call = world.call(m.Verify())
    for rank in range(2):
        lanes = np.zeros((2, 4), dtype=np.uint32)
        digested(world, rank, lanes_to_bytes(lanes))
    found = verdict(world, call)
    assert (found.differing, len(found.mismatches)) == (2, 2)
