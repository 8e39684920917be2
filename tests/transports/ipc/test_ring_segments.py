"""The book of a ring: who is packed for next, who may hold how much, and that no segment is ever anybody else's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveweight.transports.ipc.ring_segments import PackJob, RingSegments, RingSubscription


def joined(book: RingSegments, name: str, buckets: int = 100, layout: str = "l") -> RingSubscription:
    destination = RingSubscription(peer=name.encode(), number=1, layout=layout, stream="s", buckets=buckets)
    book.join(destination)
    return destination


def taken(book: RingSegments) -> list[PackJob]:
    """Everything that can be packed before somebody gives a segment back."""
    return list(iter(book.take, None))


def test_buckets_come_in_order_and_a_segment_is_free_when_it_is_given_back() -> None:
    book = RingSegments(4)
    rank = joined(book, "a", buckets=3)
    first, second = taken(book)  # half of the ring is kept for who comes late
    assert (first.bucket, second.bucket, book.free) == (0, 1, 2)
    book.freed(rank, 0)
    book.freed(rank, 0)
    assert book.free == 3
    assert [work.bucket for work in taken(book)] == [2]
    book.freed(rank, 1)
    book.freed(rank, 2)
    assert (book.free, taken(book)) == (4, [])


@pytest.mark.parametrize(("segments", "ranks"), [(4, 2), (8, 2), (8, 3), (16, 4)])
def test_a_rank_that_stands_still_never_stalls_the_others(segments: int, ranks: int) -> None:
    book = RingSegments(segments)
    still = joined(book, "still")
    taken(book)
    others = [joined(book, str(number)) for number in range(1, ranks)]
    for _ in range(1000):
        taken(book)
        for other in others:
            for bucket in list(other.held):
                book.freed(other, bucket)
    assert all(other.next == other.buckets for other in others)
    assert 0 < len(still.held) < segments


def test_a_ring_that_is_full_waits_and_more_ranks_than_segments_all_get_their_turn() -> None:
    book = RingSegments(2)
    ranks = [joined(book, str(number), buckets=5) for number in range(6)]
    while any(rank.busy for rank in ranks):
        work = taken(book)
        assert 1 <= len(work) <= 2
        for one in work:
            book.freed(one.destination, one.bucket)
    assert book.free == 2


def test_a_damaged_bucket_is_packed_again_where_it_lies_before_anything_else() -> None:
    book = RingSegments(4)
    rank = joined(book, "a")
    first, _ = taken(book)
    book.again(rank, first.bucket)
    book.again(rank, first.bucket)
    book.again(rank, 77)
    again = book.take()
    assert again == PackJob(destination=rank, bucket=0, segment=first.segment, again=True)
    assert book.take() is None


def test_what_a_rank_says_of_a_subscription_that_is_over_has_no_effect() -> None:
    book = RingSegments(4)
    old = joined(book, "a")
    taken(book)
    new = joined(book, "a")
    assert book.free == 4
    taken(book)
    book.freed(old, 0)
    assert (book.free, book.find(b"a", 1)) == (2, new)
    book.drop("l")
    assert (book.free, book.find(b"a", 1), taken(book)) == (4, None, [])


@given(
    segments=st.integers(2, 9),
    steps=st.lists(
        st.tuples(st.sampled_from(["join", "free", "take", "leave", "drop", "again"]), st.integers(0, 4)),
        max_size=80,
    ),
)
def test_no_segment_is_ever_held_twice_or_lost(segments: int, steps: list[tuple[str, int]]) -> None:
    book, ranks = RingSegments(segments), dict[int, RingSubscription]()
    for number, (step, who) in enumerate(steps):
        rank = ranks.get(who)
        match step:
            case "join":
                ranks[who] = joined(book, str(who), buckets=number % 7, layout=str(who % 2))
            case "take":
                book.take()
            case "leave":
                book.leave(str(who).encode())
            case "drop":
                book.drop(str(who % 2))
            case "free" if rank is not None and rank.held:
                book.freed(rank, next(iter(rank.held)))
            case "again" if rank is not None and rank.held:
                book.again(rank, next(iter(rank.held)))
        held = Counter(segment for rank in ranks.values() for segment in rank.held.values())
        assert all(times == 1 for times in held.values())
        assert len(held) + book.free == segments
