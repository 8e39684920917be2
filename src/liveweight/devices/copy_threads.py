"""Copy threads: a few threads that do one job together, then wait for the next; and the work queue, by which they share a job.

Owns the threads: they start, wait for jobs and end here. The job decides what is done and when it stops. The rank's staging and the
trainer's freeze both work this way, with kernels that release the GIL.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from liveweight.errors import WrongState

Work: TypeAlias = Callable[[int], None]
"""A thread's part of a job; the number is its lane, 0 for the caller's own thread."""


@dataclass(slots=True)
class _Job:
    """One call of `run`. Its first error is the one that the caller gets."""

    work: Work
    ended: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    errors: list[BaseException] = field(default_factory=list)

    def attempt(self, lane: int) -> None:
        try:
            self.work(lane)
        except BaseException as error:
            self.errors.append(error)

    def wait(self, helpers: int) -> None:
        """Wait until that many helpers have ended; an interrupt is raised after that."""
        while helpers:
            try:
                self.ended.get()
                helpers -= 1
            except BaseException as error:
                self.errors.append(error)


_Jobs: TypeAlias = "queue.SimpleQueue[_Job | None]"


class CopyThreads:
    """`threads` lanes: the thread that calls `run`, and helpers that live until `close`. One job at a time.

    With one thread there are no helpers: jobs run in the caller's thread.
    """

    def __init__(self, threads: int, *, name: str = "liveweight-copy") -> None:
        if threads < 1:
            raise ValueError(f"{threads} copy threads")
        self.threads = threads
        self._jobs: list[_Jobs] = []
        self._helpers: list[threading.Thread] = []
        self._busy = threading.Lock()
        self._closed = False
        try:
            for lane in range(1, threads):
                self._start_helper(lane, f"{name}-{lane}")
        except BaseException:  # no more threads can start: end those that have
            self.close()
            raise

    def _start_helper(self, lane: int, name: str) -> None:
        jobs: _Jobs = queue.SimpleQueue()
        helper = threading.Thread(target=_help, args=(jobs, lane), name=name, daemon=True)
        helper.start()
        self._jobs.append(jobs)
        self._helpers.append(helper)

    def run(self, work: Work) -> None:
        """Call `work(lane)` once per lane, all at the same time; returns, or raises the first error, when every lane has ended.

        It waits for all lanes without a limit of its own, since they may be writing into memory that its caller is about to free:
        a job must end its lanes itself when one of them fails.
        """
        if not self._busy.acquire(blocking=False):
            raise WrongState("the copy threads are at work", "a second job")
        try:
            if self._closed:
                raise WrongState("the copy threads are closed", "a job")
            job = _Job(work)
            for jobs in self._jobs:
                jobs.put(job)
            job.attempt(0)
            job.wait(len(self._helpers))
        finally:
            self._busy.release()
        if job.errors:
            raise job.errors[0]

    def close(self) -> None:
        """End the helpers. Not during a job; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for jobs in self._jobs:
            jobs.put(None)
        for helper in self._helpers:
            helper.join()

    def __enter__(self) -> CopyThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_once(threads: int, work: Work, *, name: str) -> None:
    """Run one job as CopyThreads would, without keeping the threads: the helpers start and end with the job."""
    job, helpers = _Job(work), list[threading.Thread]()
    try:
        for lane in range(1, threads):
            jobs: _Jobs = queue.SimpleQueue()
            jobs.put(job)
            jobs.put(None)
            helper = threading.Thread(target=_help, args=(jobs, lane), name=f"{name}-{lane}", daemon=True)
            helper.start()
            helpers.append(helper)
        job.attempt(0)
    finally:
        job.wait(len(helpers))
        for helper in helpers:
            helper.join()
    if job.errors:
        raise job.errors[0]


class WorkQueue:
    """Numbers from 0 on, each handed out once, in order, to the next free lane of the copy threads; until a lane ends it."""

    def __init__(self, count: int) -> None:
        self._count, self._handed_out = count, 0
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def work_through(self, lane: int, work: Callable[[int, int], None]) -> None:
        """One lane's part: `work(lane, number)` for number after number. An error of any lane ends all of them."""
        try:
            while (number := self._next()) is not None:
                work(lane, number)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Hand out no more."""
        self._ended.set()

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether a lane has ended it, or does so within `within_s`."""
        return self._ended.wait(within_s) if within_s > 0 else self._ended.is_set()

    def _next(self) -> int | None:
        with self._lock:
            number = self._handed_out
            self._handed_out += 1
        return number if number < self._count and not self._ended.is_set() else None


def _help(jobs: _Jobs, lane: int) -> None:
    while (job := jobs.get()) is not None:
        job.attempt(lane)
        job.ended.put(None)
        del job  # an idle thread holds nothing of the last job: its memory may be freed
