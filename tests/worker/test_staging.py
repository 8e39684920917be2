"""Staging: rows shared out over copy threads, paced, stopped; and the digest that reads them back."""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, DeadlineExceeded, OfferChanged, WrongState
from liveweight.plan.copies import plan_copies, row_bytes, split
from liveweight.spec import digest
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import whole
from liveweight.spec.row_table import Table
from liveweight.transports.port import GoOn, patient
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging import (
    BATCH_BYTES,
    Outcome,
    Pace,
    StageResult,
    StagingStopped,
    cut,
    run_batches,
    stage,
)
from tests.support.layouts import Bytes, filled, fulls, placed, tilings, view


def never() -> bool:
    return False


def soon() -> Deadline:
    return Deadline.after(60)


def copy_threads_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("liveweight")]


@dataclass(slots=True, kw_only=True)
class ArrayReading:
    """The port over arrays of this process: a source that says so when its generation is raised."""

    rows: Table
    sources: Sequence[Bytes]
    targets: Sequence[Bytes]
    overlaps: bool = False
    generation: int = 0
    offered: int = 0
    ends: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        del go_on
        self.reads.append((first, last))
        self.threads.add(threading.get_ident())
        for row in self.rows[first:last].tolist():
            source, at, target, to, outer, oa, ob, inner, ia, ib, chunk = row
            shape = (outer, inner, chunk)
            taken = np.ndarray(shape, np.uint8, self.sources[source].data, at, (oa, ia, 1))
            np.ndarray(shape, np.uint8, self.targets[target].data, to, (ob, ib, 1))[...] = taken

    def check(self) -> None:
        if self.generation != self.offered:
            raise OfferChanged(f"generation {self.generation}, offered was {self.offered}")

    def end(self) -> None:
        self.ends += 1


@dataclass(slots=True, kw_only=True)
class WatchedReading(ArrayReading):
    """The same; the test sees every read before it happens, and may raise."""

    watch: Callable[[int], None]

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        self.watch(len(self.reads))
        ArrayReading.read(self, first, last, go_on)


def flat(size_bytes: int, row_limit_bytes: int) -> tuple[Table, Bytes, Bytes]:
    """Rows, source and target of one plain run of bytes."""
    layout = packed([TensorSpec(name="w", dtype=DType.UINT8, shape=(size_bytes,))])
    rows = split(plan_copies(layout, layout).rows, row_limit_bytes)
    source = np.random.default_rng(1).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)
    return rows, source, np.zeros_like(source)


def flat_reading(
    size_bytes: int, *, row_limit_bytes: int = 1 << 20, watch: Callable[[int], None] = lambda _: None
) -> WatchedReading:
    rows, source, target = flat(size_bytes, row_limit_bytes)
    return WatchedReading(rows=rows, sources=[source], targets=[target], watch=watch)


@pytest.fixture(params=[1, 2, 3])
def copy_threads(request: pytest.FixtureRequest) -> Iterator[CopyThreads]:
    with CopyThreads(request.param) as copy_threads:
        yield copy_threads
    assert copy_threads_threads() == []


# The copy threads.


def test_every_copy_thread_works_once(copy_threads: CopyThreads) -> None:
    lanes: list[int] = []
    copy_threads.run(lanes.append)
    copy_threads.run(lanes.append)
    assert sorted(lanes) == sorted([*range(copy_threads.threads)] * 2)


def test_a_single_copy_thread_is_the_callers_thread() -> None:
    with CopyThreads(1) as copy_threads:
        idents: list[int] = []
        copy_threads.run(lambda _: idents.append(threading.get_ident()))
        assert copy_threads_threads() == []
    assert idents == [threading.get_ident()]


def test_lane_zero_is_the_callers_thread(copy_threads: CopyThreads) -> None:
    idents: dict[int, int] = {}
    copy_threads.run(lambda lane: idents.update({lane: threading.get_ident()}))
    assert idents[0] == threading.get_ident()
    assert len(set(idents.values())) == copy_threads.threads


def test_errors_of_many_lanes_are_raised_as_one_after_all_have_ended(copy_threads: CopyThreads) -> None:
    ended: list[int] = []

    def work(lane: int) -> None:
        ended.append(lane)
        raise ValueError(f"lane {lane}")

    with pytest.raises(ValueError, match="lane"):
        copy_threads.run(work)
    assert len(ended) == copy_threads.threads
    copy_threads.run(ended.append)  # and the copy threads goes on


def test_copy_threads_have_one_job_at_a_time(copy_threads: CopyThreads) -> None:
    def work(lane: int) -> None:
        if lane == 0:
            copy_threads.run(lambda _: None)

    with pytest.raises(WrongState, match="at work"):
        copy_threads.run(work)


def test_closed_copy_threads_refuse_work_and_can_be_closed_again(copy_threads: CopyThreads) -> None:
    copy_threads.close()
    copy_threads.close()
    with pytest.raises(WrongState, match="closed"):
        copy_threads.run(lambda _: None)


def test_idle_copy_threads_hold_nothing_of_their_last_job(copy_threads: CopyThreads) -> None:
    class Held: ...

    def work(held: Held, _: int) -> None:
        del held

    held = Held()
    gone = weakref.ref(held)
    copy_threads.run(functools.partial(work, held))
    del held
    copy_threads.run(lambda _: None)  # every helper has come back for the next job
    assert gone() is None


def test_copy_threads_need_a_thread() -> None:
    with pytest.raises(ValueError, match="0 copy threads"):
        CopyThreads(0)


# Batches.


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 500))
def test_batches_follow_each_other_and_none_is_larger_than_a_batch_and_a_row(
    sizes: list[int], batch: int
) -> None:
    rows = np.array(sizes, dtype=np.int64)
    ends = cut(rows, batch).tolist()
    assert ends == sorted(set(ends)) and ends[-1:] == ([len(sizes)] if sizes else [])
    assert len(ends) <= sum(sizes) // batch + 1
    for first, last in itertools.pairwise([0, *ends]):
        assert rows[first:last].sum() < batch + max(1, *sizes[first:last])


def test_many_small_rows_are_few_reads(copy_threads: CopyThreads) -> None:
    specs = [TensorSpec(name=f"w{i}", dtype=DType.UINT8, shape=(64,)) for i in range(40_000)]
    layout = packed(specs)
    source = np.random.default_rng(1).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)
    reading = ArrayReading(
        rows=plan_copies(layout, layout).rows, sources=[source], targets=[np.zeros_like(source)]
    )
    stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    assert len(reading.reads) <= 16
    assert np.array_equal(reading.targets[0], source)


def test_large_rows_are_read_one_batch_at_a_time() -> None:
    reading = flat_reading(8 * BATCH_BYTES)
    with CopyThreads(1) as copy_threads:
        stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    sizes = row_bytes(reading.rows)
    assert {int(sizes[first:last].sum()) for first, last in reading.reads} == {BATCH_BYTES}


# Staging.


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_a_staged_shadow_is_what_slicing_gives(data: st.DataObject, threads: int) -> None:
    tensors = {name: data.draw(fulls(name=name)) for name in ("a", "b")}
    wanted = [(full.spec, tile) for full in tensors.values() for tile in data.draw(tilings(full.spec.shape))]
    source = data.draw(placed([(full.spec, whole(full.spec.shape)) for full in tensors.values()]))
    target = data.draw(placed(wanted))
    shadow = [np.zeros(size, dtype=np.uint8) for size in target.memories_bytes]
    rows = split(plan_copies(source, target).rows, data.draw(st.sampled_from([1, 64, 1 << 20])))
    reading = ArrayReading(rows=rows, sources=filled(source, tensors), targets=shadow)
    with CopyThreads(threads) as copy_threads:
        result = stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
        lanes = digest_of(target, shadow, copy_threads)
    assert isinstance(result, StageResult)
    assert result.size_bytes == target.placed_bytes
    for placement, own in zip(target.placements, lanes, strict=True):
        full = tensors[placement.name]
        seen = view(shadow[placement.memory], placement, full.spec.dtype.size_bytes)
        assert np.array_equal(seen, full.part(placement.region))
        assert np.array_equal(own, digest.partial(shadow[placement.memory], placement, full.spec))


def test_all_copy_threads_read(copy_threads: CopyThreads) -> None:
    together, met = threading.Barrier(copy_threads.threads), set()

    def watch(_: int) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            together.wait(60)

    reading = flat_reading(32 << 20, watch=watch)
    stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    assert len(reading.threads) == copy_threads.threads
    assert np.array_equal(reading.targets[0], reading.sources[0])


class RecordedWork:
    """Concurrent work that records which rows it was given, and whether it ended."""

    def __init__(self, reading: WatchedReading) -> None:
        self.reading, self.rows, self.ended = reading, list[tuple[int, int]](), False

    def landed(self, first: int, last: int) -> None:
        assert (first, last) in self.reading.reads
        assert not self.ended
        self.rows.append((first, last))

    def during(self, work: Callable[[], Outcome]) -> Outcome:
        try:
            return work()
        finally:
            self.ended = True


def test_what_works_beside_a_stage_hears_of_every_row_once_it_is_there(copy_threads: CopyThreads) -> None:
    work = RecordedWork(flat_reading(32 << 20))
    stage(
        work.reading,
        copy_threads=copy_threads,
        pace_bytes_per_s=None,
        stop=never,
        deadline=soon(),
        concurrent=work,
    )
    assert sorted(work.rows) == sorted(work.reading.reads)
    assert sum(last - first for first, last in work.rows) == len(work.reading.rows)
    assert work.ended


def test_what_works_beside_a_stage_that_fails_ends_with_it(copy_threads: CopyThreads) -> None:
    def fail(number: int) -> None:
        if number == 3:
            raise ChannelClosed("the source is gone")

    work = RecordedWork(flat_reading(32 << 20, watch=fail))
    with pytest.raises(ChannelClosed):
        stage(
            work.reading,
            copy_threads=copy_threads,
            pace_bytes_per_s=None,
            stop=never,
            deadline=soon(),
            concurrent=work,
        )
    assert work.ended


def test_nothing_to_read_is_a_finished_stage(copy_threads: CopyThreads) -> None:
    reading = ArrayReading(rows=np.empty((0, 11), dtype=np.int64), sources=[], targets=[])
    result = stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    assert isinstance(result, StageResult) and result.size_bytes == 0


def test_a_stop_ends_all_threads_and_is_no_result(copy_threads: CopyThreads) -> None:
    caller, stopped = threading.get_ident(), threading.Event()

    def watch(number: int) -> None:
        if number >= 3 and threading.get_ident() != caller:
            stopped.wait(60)

    def stop() -> bool:
        if len(reading.reads) >= 3:
            stopped.set()
        return stopped.is_set()

    reading = flat_reading(64 << 20, watch=watch)
    result = stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=stop, deadline=soon())
    assert isinstance(result, StagingStopped)
    sizes = row_bytes(reading.rows)
    assert result.done_bytes == sum(int(sizes[first:last].sum()) for first, last in reading.reads)
    assert 0 < result.done_bytes < result.size_bytes == 64 << 20


def test_stop_is_asked_in_the_callers_thread_only(copy_threads: CopyThreads) -> None:
    idents: set[int] = set()

    def stop() -> bool:
        idents.add(threading.get_ident())
        return False

    stage(
        flat_reading(32 << 20),
        copy_threads=copy_threads,
        pace_bytes_per_s=1 << 30,
        stop=stop,
        deadline=soon(),
    )
    assert idents <= {threading.get_ident()}


def test_a_stop_is_heard_during_a_long_wait_for_the_pace(copy_threads: CopyThreads) -> None:
    reading = flat_reading(8 << 20)
    asked = iter(range(100))
    result = stage(
        reading,
        copy_threads=copy_threads,
        pace_bytes_per_s=1000,
        stop=lambda: next(asked) > copy_threads.threads,
        deadline=soon(),
    )
    assert isinstance(result, StagingStopped)


def test_a_deadline_that_is_over_names_the_progress(copy_threads: CopyThreads) -> None:
    with pytest.raises(DeadlineExceeded, match=rf"staging, 0 of {8 << 20} bytes done"):
        stage(
            flat_reading(8 << 20),
            copy_threads=copy_threads,
            pace_bytes_per_s=None,
            stop=never,
            deadline=Deadline.after(0),
        )


def test_a_deadline_ends_a_wait_for_the_pace(copy_threads: CopyThreads) -> None:
    reading = flat_reading(8 << 20)
    with pytest.raises(DeadlineExceeded, match=r"staging, [1-9]"):
        stage(
            reading,
            copy_threads=copy_threads,
            pace_bytes_per_s=1000,
            stop=never,
            deadline=Deadline.after(0.2),
        )
    assert len(reading.reads) < 8


@pytest.mark.parametrize("failing", [0, 5])
def test_an_error_in_one_thread_ends_the_others_and_is_raised_once(
    copy_threads: CopyThreads, failing: int
) -> None:
    def watch(number: int) -> None:
        if number >= failing:
            raise OSError(f"read {number}")

    reading = flat_reading(256 << 20, row_limit_bytes=1 << 20, watch=watch)
    with pytest.raises(OSError, match="read"):
        stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    assert len(reading.reads) <= failing


def test_an_offer_that_changed_before_the_first_read_is_not_read(copy_threads: CopyThreads) -> None:
    reading = flat_reading(1 << 20)
    reading.generation = 1
    with pytest.raises(OfferChanged):
        stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())
    assert reading.reads == []


def test_an_offer_that_changes_under_the_last_read_is_noticed(copy_threads: CopyThreads) -> None:
    reading = flat_reading(1 << 20)
    reading.watch = lambda _: setattr(reading, "generation", 1)
    with pytest.raises(OfferChanged):
        stage(reading, copy_threads=copy_threads, pace_bytes_per_s=None, stop=never, deadline=soon())


# Pace.


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 5)), min_size=1, max_size=40),
    st.floats(1, 1e5),
)
def test_a_pace_never_lets_more_through_than_its_rate_and_its_credit(
    moves: list[tuple[int, float]], rate: float
) -> None:
    now = [100.0]
    pace = Pace(rate, credit_s=0.5, clock=lambda: now[0])
    moved = 0
    for size, idle_s in moves:
        now[0] = max(now[0], pace.reserve(size))  # the wait
        assert moved <= rate * (now[0] - 100.0 + 0.5) * (1 + 1e-9)
        moved += size
        now[0] += idle_s


def test_a_pace_makes_up_for_waits_that_end_late() -> None:
    now = [0.0]
    pace = Pace(1000, credit_s=0.05, clock=lambda: now[0])
    for _ in range(100):
        now[0] = max(now[0], pace.reserve(100)) + 0.003  # each wait 3 ms late
    assert now[0] == pytest.approx(
        9.9, abs=0.01
    )  # 100 x 100 bytes at 1000 bytes/s, the last one not waited for


def test_a_pace_must_be_positive() -> None:
    with pytest.raises(ValueError, match="pace"):
        Pace(0)


def test_a_paced_stage_takes_its_time_in_small_steps(copy_threads: CopyThreads) -> None:
    reading = flat_reading(8 << 20, row_limit_bytes=128 << 10)
    began_s = time.monotonic()
    result = stage(reading, copy_threads=copy_threads, pace_bytes_per_s=32 << 20, stop=never, deadline=soon())
    assert isinstance(result, StageResult)
    assert time.monotonic() - began_s >= 0.1  # a quarter of a second, less the credit and the last steps
    assert len(reading.reads) >= 8
    assert np.array_equal(reading.targets[0], reading.sources[0])


def test_a_shared_job_reports_its_bytes(copy_threads: CopyThreads) -> None:
    done: list[int] = []
    sizes = np.full(1000, 4096, dtype=np.int64)
    outcome = run_batches(
        sizes,
        lambda _, first, last: done.extend(range(first, last)),
        copy_threads=copy_threads,
        stop=never,
        deadline=soon(),
        what="test",
    )
    assert outcome == 1000 * 4096
    assert sorted(done) == list(range(1000))


# Reading back.


def digest_of(layout: Layout, memories: Sequence[Bytes], copy_threads: CopyThreads) -> digest.Lanes:
    shadow = [Memory.from_array(memory) for memory in memories]
    lanes = ShadowDigest(layout, choose_kernels()).of(
        shadow, copy_threads=copy_threads, stop=never, deadline=soon()
    )
    assert not isinstance(lanes, StagingStopped)
    return lanes


SPECS = [
    TensorSpec(name="large", dtype=DType.BFLOAT16, shape=(3000, 2000)),
    TensorSpec(name="vector", dtype=DType.FLOAT32, shape=(77,)),
    TensorSpec(name="empty", dtype=DType.FLOAT32, shape=(0, 4)),
]


def test_digests_of_many_threads_are_the_references(copy_threads: CopyThreads) -> None:
    layout = packed(SPECS)
    memory = np.random.default_rng(3).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)
    lanes = digest_of(layout, [memory], copy_threads)
    for own, placement, spec in zip(lanes, layout.placements, SPECS, strict=True):
        assert np.array_equal(own, digest.partial(memory, placement, spec))


def test_a_flipped_bit_changes_the_digest_of_its_tensor_alone(copy_threads: CopyThreads) -> None:
    layout = packed(SPECS)
    memory = np.random.default_rng(3).integers(0, 256, layout.memories_bytes[0], dtype=np.uint8)
    before = digest_of(layout, [memory], copy_threads)
    memory[5_000_001] ^= 4
    assert (digest_of(layout, [memory], copy_threads) != before).any(axis=1).tolist() == [True, False, False]


def test_two_sets_of_memory_take_turns_and_are_let_go(copy_threads: CopyThreads) -> None:
    layout = packed(SPECS[1:2])
    arrays = [np.full(layout.memories_bytes[0], fill, dtype=np.uint8) for fill in (1, 2, 3)]
    sets = [[Memory.from_array(array)] for array in arrays]
    reader = ShadowDigest(layout, choose_kernels())
    for number in (0, 1, 0, 1, 2, 0):
        lanes = reader.of(sets[number], copy_threads=copy_threads, stop=never, deadline=soon())
        assert not isinstance(lanes, StagingStopped)
        assert np.array_equal(lanes, digest_of(layout, [arrays[number]], copy_threads))
    gone = [weakref.ref(array) for array in arrays]
    reader.forget()
    del arrays, sets
    assert [ref() for ref in gone] == [None] * 3


def test_verifying_stops_and_keeps_its_deadline(copy_threads: CopyThreads) -> None:
    layout = packed(SPECS)
    shadow = [Memory.from_array(np.zeros(layout.memories_bytes[0], dtype=np.uint8))]
    reader = ShadowDigest(layout, choose_kernels())
    assert isinstance(
        reader.of(shadow, copy_threads=copy_threads, stop=lambda: True, deadline=soon()), StagingStopped
    )
    with pytest.raises(DeadlineExceeded, match="verifying"):
        reader.of(shadow, copy_threads=copy_threads, stop=never, deadline=Deadline.after(0))
