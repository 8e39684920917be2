"""The segments of a ring: which rank is packed for next, how many segments a rank may have, and that no two ranks have the same one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveweight.transports.ipc.ring_segments import PackJob, RingSegments, RingSubscription


def subscribed(ring: RingSegments, name: str, buckets: int = 100, layout: str = "l") -> RingSubscription:
    subscription = RingSubscription(peer=name.encode(), number=1, layout=layout, stream="s", buckets=buckets)
    ring.subscribe(subscription)
    return subscription


def packed(ring: RingSegments) -> list[PackJob]:
    """All jobs before a rank frees a segment."""
    return list(iter(ring.next_job, None))


def test_buckets_come_in_order_and_a_segment_is_free_when_it_is_given_back() -> None:
    ring = RingSegments(4)
    rank = subscribed(ring, "a", buckets=3)
    first, second = packed(ring)  # half of the ring is kept for ranks that subscribe late
    assert (first.bucket, second.bucket, ring.free) == (0, 1, 2)
    ring.freed(rank, 0)
    ring.freed(rank, 0)
    assert ring.free == 3
    assert [job.bucket for job in packed(ring)] == [2]
    ring.freed(rank, 1)
    ring.freed(rank, 2)
    assert (ring.free, packed(ring)) == (4, [])


@pytest.mark.parametrize(("segments", "ranks"), [(4, 2), (8, 2), (8, 3), (16, 4)])
def test_a_rank_that_stands_still_never_stalls_the_others(segments: int, ranks: int) -> None:
    ring = RingSegments(segments)
    still = subscribed(ring, "still")
    packed(ring)
    others = [subscribed(ring, str(number)) for number in range(1, ranks)]
    for _ in range(1000):
        packed(ring)
        for other in others:
            for bucket in list(other.held):
                ring.freed(other, bucket)
    assert all(other.next == other.buckets for other in others)
    assert 0 < len(still.held) < segments


def test_a_ring_that_is_full_waits_and_more_ranks_than_segments_all_get_their_turn() -> None:
    ring = RingSegments(2)
    ranks = [subscribed(ring, str(number), buckets=5) for number in range(6)]
    while any(rank.busy for rank in ranks):
        job = packed(ring)
        assert 1 <= len(job) <= 2
        for one in job:
            ring.freed(one.subscription, one.bucket)
    assert ring.free == 2


def test_a_damaged_bucket_is_packed_again_where_it_lies_before_anything_else() -> None:
    ring = RingSegments(4)
    rank = subscribed(ring, "a")
    first, _ = packed(ring)
    ring.repack(rank, first.bucket)
    ring.repack(rank, first.bucket)
    ring.repack(rank, 77)
    again = ring.next_job()
    assert again == PackJob(subscription=rank, bucket=0, segment=first.segment, again=True)
    assert ring.next_job() is None


def test_what_a_rank_says_of_a_subscription_that_is_over_has_no_effect() -> None:
    ring = RingSegments(4)
    old = subscribed(ring, "a")
    packed(ring)
    new = subscribed(ring, "a")
    assert ring.free == 4
    packed(ring)
    ring.freed(old, 0)
    assert (ring.free, ring.find(b"a", 1)) == (2, new)
    ring.end_offer("l")
    assert (ring.free, ring.find(b"a", 1), packed(ring)) == (4, None, [])


@given(
    segments=st.integers(2, 9),
    steps=st.lists(
        st.tuples(st.sampled_from(["join", "free", "take", "leave", "drop", "again"]), st.integers(0, 4)),
        max_size=80,
    ),
)
def test_no_segment_is_ever_held_twice_or_lost(segments: int, steps: list[tuple[str, int]]) -> None:
    ring, ranks = RingSegments(segments), dict[int, RingSubscription]()
    for number, (step, who) in enumerate(steps):
        rank = ranks.get(who)
        match step:
            case "join":
                ranks[who] = subscribed(ring, str(who), buckets=number % 7, layout=str(who % 2))
            case "take":
                ring.next_job()
            case "leave":
                ring.unsubscribe(str(who).encode())
            case "drop":
                ring.end_offer(str(who % 2))
            case "free" if rank is not None and rank.held:
                ring.freed(rank, next(iter(rank.held)))
            case "again" if rank is not None and rank.held:
                ring.repack(rank, next(iter(rank.held)))
        held = Counter(segment for rank in ranks.values() for segment in rank.held.values())
        assert all(times == 1 for times in held.values())
        assert len(held) + ring.free == segments
