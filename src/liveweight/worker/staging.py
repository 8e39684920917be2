"""Staging: the rows of a reading, divided among copy threads, paced, and interrupted between batches.

Owns the order of the work, not the bytes: how a row is read is transports/'s, which rows there are is plan/'s. What a stop means
for the round is the caller's: here it is a value, StagingStopped, which the caller cannot mistake for a finished stage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from liveweight.devices.copy_threads import CopyThreads, WorkQueue
from liveweight.plan.copies import row_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.row_table import Table
from liveweight.transports.port import Reading

BATCH_BYTES = 8 << 20
"""What a thread takes at a time: a millisecond of copying, so that Python's overhead is small and a stop is prompt."""

CONCURRENT_BATCH_BYTES = 2 << 20
"""The same with concurrent work on the rows that were read: little of it is left at the end."""

SMALLEST_BATCH_BYTES = 256 << 10
BATCHES_PER_THREAD = 8
PACED_BATCH_S = 0.01
POLL_S = 0.02
"""How long a paced thread waits before it checks again whether to stop."""

Stop: TypeAlias = Callable[[], bool]
"""Whether to end the work early. Called between batches, only in the thread that started the work."""

Rows: TypeAlias = Callable[[int, int, int], None]
"""Work on rows [first, last), in a lane: (lane, first, last)."""


Outcome = TypeVar("Outcome")


class ConcurrentWork(Protocol):
    """Work on rows that have been read, while others are being read."""

    def landed(self, first: int, last: int) -> None:
        """Rows [first, last) have been read. Called from any thread."""

    def during(self, work: Callable[[], Outcome]) -> Outcome:
        """Run `work` in this thread and the concurrent work in another. When it returns or raises, both have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Everything was read."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingStopped:
    """The caller's `stop` ended the work early, after `done_bytes`."""

    done_bytes: int
    size_bytes: int


class Pace:
    """A token bucket: when the next bytes may be moved. Shared by all copy threads.

    A little unused time is credited, so that waits that end late do not lower the rate.
    """

    def __init__(
        self, bytes_per_s: float, *, credit_s: float = 0.05, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a pace of {bytes_per_s} bytes/s")
        self.bytes_per_s, self.clock = bytes_per_s, clock
        self._credit_s = credit_s
        self._lock = threading.Lock()
        self._next_s = clock()

    def reserve(self, size_bytes: int) -> float:
        """The moment of the clock at which these bytes may be moved; their time is taken now."""
        with self._lock:
            start = max(self._next_s, self.clock() - self._credit_s)
            self._next_s = start + size_bytes / self.bytes_per_s
            return start


def stage(
    reading: Reading,
    *,
    copy_threads: CopyThreads,
    pace_bytes_per_s: float | None,
    stop: Stop,
    deadline: Deadline,
    ends: Table | None = None,
    concurrent: ConcurrentWork | None = None,
) -> StageResult | StagingStopped:
    """Read every row into the shadow, and check before and after that the source did not change. Called from the staging thread.

    `ends` says where batches of rows end; by default their sizes do. `concurrent` works on rows that have been read. When `stage` returns
    or raises, no thread reads any more. Raises DeadlineExceeded, OfferChanged, or the reading's error.
    """
    began_s = time.monotonic()
    reads = _Reads(reading=reading, stop=stop, deadline=deadline, concurrent=concurrent)
    sizes = row_bytes(reading.rows)
    try:
        reading.check()
        pace = None if pace_bytes_per_s is None else Pace(pace_bytes_per_s)
        outcome = (
            reads.all_of(sizes, copy_threads, pace, ends)
            if concurrent is None
            else concurrent.during(lambda: reads.all_of(sizes, copy_threads, pace, ends))
        )
        if isinstance(outcome, StagingStopped):
            return outcome
        if reads.ended:
            return StagingStopped(done_bytes=outcome, size_bytes=int(sizes.sum()))
        reading.check()
        return StageResult(size_bytes=outcome, seconds=time.monotonic() - began_s)
    finally:
        reading.end()


@dataclass(slots=True, kw_only=True)
class _Reads:
    """Reads that may wait until the deadline, or until the caller's `stop`, which only lane 0 may call."""

    reading: Reading
    stop: Stop
    deadline: Deadline
    concurrent: ConcurrentWork | None
    ended: bool = False

    def all_of(
        self, sizes: Table, copy_threads: CopyThreads, pace: Pace | None, ends: Table | None
    ) -> int | StagingStopped:
        if ends is None and self.concurrent is not None:
            ends = cut(sizes, CONCURRENT_BATCH_BYTES)
        return run_batches(
            sizes,
            self.read,
            copy_threads=copy_threads,
            stop=self.stop,
            deadline=self.deadline,
            what="staging",
            pace=pace,
            ends=ends,
        )

    def read(self, lane: int, first: int, last: int) -> None:
        self.reading.read(first, last, lambda: self.go_on(lane))
        if self.concurrent is not None and not self.ended:
            self.concurrent.landed(first, last)

    def go_on(self, lane: int) -> bool:
        self.deadline.check("bytes of the source to arrive, while staging")
        if lane == 0 and not self.ended:
            self.ended = self.stop()
        return not self.ended


def run_batches(
    sizes_bytes: Table,
    work: Rows,
    *,
    copy_threads: CopyThreads,
    stop: Stop,
    deadline: Deadline,
    what: str,
    pace: Pace | None = None,
    smallest_batch_bytes: int = SMALLEST_BATCH_BYTES,
    ends: Table | None = None,
) -> int | StagingStopped:
    """Work through rows of these sizes, in batches that the next free thread takes. Returns the bytes done, or StagingStopped.

    `smallest_batch_bytes` is for work that costs something per call; with `ends`, batches end there.
    The first error of any thread ends all of them, and is raised here. `stop` and the deadline are checked between batches.
    """
    size = int(sizes_bytes.sum())
    if stop():
        return StagingStopped(done_bytes=0, size_bytes=size)
    if ends is None:
        ends = cut(sizes_bytes, max(smallest_batch_bytes, _batch_bytes(size, copy_threads.threads, pace)))
    job = _Job(
        ends=ends,
        bytes_before=np.concatenate([[0], np.cumsum(sizes_bytes)])[np.concatenate([[0], ends])],
        work=work,
        stop=stop,
        deadline=deadline,
        what=what,
        pace=pace,
        queue=WorkQueue(len(ends)),
    )
    copy_threads.run(job.work_through)
    return StagingStopped(done_bytes=job.done_bytes, size_bytes=size) if job.stopped else job.done_bytes


def cut(sizes_bytes: Table, batch_bytes: int) -> npt.NDArray[np.int64]:
    """Where batches of rows end: with the row that reaches the next multiple of `batch_bytes`. None has a row more than that."""
    ends = np.cumsum(sizes_bytes)
    total = int(ends[-1]) if len(ends) else 0
    marks = np.arange(batch_bytes, total, batch_bytes, dtype=np.int64)
    last = np.array([len(ends)] if len(ends) else [], dtype=np.int64)
    return np.unique(np.concatenate([np.searchsorted(ends, marks) + 1, last]))


def _batch_bytes(total_bytes: int, threads: int, pace: Pace | None) -> int:
    """Small enough that threads finish together and paced copies do not come in bursts."""
    even = total_bytes // (threads * BATCHES_PER_THREAD)
    smooth = BATCH_BYTES if pace is None else int(pace.bytes_per_s * PACED_BATCH_S)
    return min(BATCH_BYTES, even, smooth)


@dataclass(slots=True, kw_only=True)
class _Job:
    """Batches of rows, given out in order to the copy threads, one lane each. Batch i ends before row ends[i]."""

    ends: Table
    bytes_before: Table
    work: Rows
    stop: Stop
    deadline: Deadline
    what: str
    pace: Pace | None
    queue: WorkQueue
    done_bytes: int = 0
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def work_through(self, lane: int) -> None:
        """One lane's part: batch after batch until none is left, or until some lane ends the job."""
        self.queue.work_through(lane, self._batch)

    def _batch(self, lane: int, batch: int) -> None:
        if not self._goes_on(lane):
            return
        size = int(self.bytes_before[batch + 1] - self.bytes_before[batch])
        if self.pace is not None and not self._wait(lane, self.pace, size):
            return
        self.work(lane, int(self.ends[batch - 1]) if batch else 0, int(self.ends[batch]))
        with self._lock:
            self.done_bytes += size

    def _goes_on(self, lane: int) -> bool:
        """Whether to run the next batch: not after an error, a stop or the deadline."""
        if self.queue.ended():
            return False
        if lane == 0 and self.stop():
            self.stopped = True
            self.queue.end()
            return False
        if self.deadline.over:
            size = int(self.bytes_before[-1])
            raise self.deadline.exceeded(f"{self.what}, {self.done_bytes} of {size} bytes done")
        return True

    def _wait(self, lane: int, pace: Pace, size_bytes: int) -> bool:
        """Wait until the pace allows these bytes; False if the job ended meanwhile."""
        moment_s = pace.reserve(size_bytes)
        while (left_s := moment_s - pace.clock()) > 0:
            poll_s = min(left_s, POLL_S, self.deadline.remaining_s())
            if self.queue.ended(poll_s) or not self._goes_on(lane):
                return False
        return True
