"""Overwriting: a rank without a shadow reads its source straight over its live weights, while its main thread waits at a boundary.

Owns the queue between the two threads. The staging thread locates the source before the vote and keeps it; the main thread submits a
request when it has the decision, and waits. Whether anything was written is known exactly: a failure before that leaves the weights whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from liveweight.devices.copy_threads import CopyThreads
from liveweight.errors import ChannelClosed, LiveWeightError, RoundAborted, Unavailable, WrongState
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.plan.copies import row_bytes
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.port import GoOn, Reading, patient
from liveweight.wire.messages import Stage
from liveweight.wire.messages.values import Fault, Overwritten, RoundId, fault_of
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging import BATCH_BYTES, StagingStopped, Stop, cut, stage
from liveweight.worker.targets.target import Target

_TARGET_MEMORY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlaceSettings:
    """How many bytes a thread reads at a time, and how many of `draft`, the tensors of an engine's MTP layer. A chunk ends with a row of
    the transfer's table, which has 2 MB at most.

    `synchronise` waits for what the weights' device still computes with them.
    """

    chunk_bytes: int = BATCH_BYTES
    draft_chunk_bytes: int = BATCH_BYTES
    draft: frozenset[str] = frozenset()
    synchronise: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.draft_chunk_bytes < 1:
            raise ValueError(f"chunks of {self.chunk_bytes} and {self.draft_chunk_bytes} bytes")

    def ends(self, rows: Table, layout: Layout) -> Table:
        """Where chunks of these rows end. A byte of the draft counts as much more as its chunks are smaller."""
        memories = sorted({place.memory for place in layout.placements if place.name in self.draft})
        sizes, drafts = row_bytes(rows), np.isin(rows[:, _TARGET_MEMORY], memories)
        scaled = -(-sizes * self.chunk_bytes // self.draft_chunk_bytes)
        return cut(np.where(drafts, scaled, sizes), self.chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    """A source that was located and bound to live memory; nothing has been read from it."""

    order: Stage
    reading: Reading
    layout: Layout


class OverwriteRequest:
    """A request of the main thread to the staging thread. It runs, or is withdrawn, never both."""

    def __init__(self, epoch: int, deadline: Deadline) -> None:
        self.epoch, self.deadline = epoch, deadline
        self._lock, self._over = threading.Lock(), threading.Event()
        self._running = False
        self._end: tuple[Overwritten, Fault | None] | None = None

    def begin(self) -> bool:
        """The staging thread begins it; False if the main thread has stopped waiting."""
        with self._lock:
            self._running = not self._over.is_set()
            return self._running

    def finish(self, done: Overwritten, fault: Fault | None) -> None:
        """The staging thread has ended it."""
        with self._lock:
            if self._end is None:
                self._end = done, fault
            self._over.set()

    def wait(self, rank: int) -> tuple[Overwritten, Fault | None]:
        """The result, at the deadline at the latest: a request that still runs then may have written anything. For the main thread."""
        self._over.wait(self.deadline.remaining_s())
        with self._lock:
            if self._end is None:
                late = self.deadline.exceeded("the source's bytes, while overwriting")
                fault = fault_of(late, step="commit", rank=rank, waited_s=late.waited_s)
                self._end = Overwritten(begun=self._running), fault
                self._over.set()
            return self._end


class OverwriteQueue:
    """The queue between a rank's two threads. `submit` is for the main thread, everything else for the staging thread."""

    def __init__(self, settings: InPlaceSettings) -> None:
        self.settings = settings
        self.wake: Callable[[], None] = lambda: None
        """Called when a request was submitted."""
        self._lock = threading.Lock()
        self._request: OverwriteRequest | None = None
        self._closed = False
        self._source: LocatedSource | None = None

    def submit(self, epoch: int, deadline: Deadline) -> OverwriteRequest:
        """Request an overwrite with that round's source, by the deadline."""
        request = OverwriteRequest(epoch, deadline)
        with self._lock:
            if self._closed:
                request.finish(
                    Overwritten(begun=False), _untouched(ChannelClosed("the rank's staging thread has ended"))
                )
                return request
            self._request = request
        self.wake()
        return request

    def keep_source(self, found: LocatedSource) -> None:
        """Keep a located source; release the one before."""
        self.release_source()
        self._source = found

    def release_source(self, round_id: RoundId | None = None) -> None:
        """Release the source of that round, or, if None, whichever is kept."""
        if self._source is not None and round_id in (None, self._source.order.round):
            found, self._source = self._source, None
            found.reading.end()

    def take(self) -> tuple[OverwriteRequest, LocatedSource] | None:
        """The request to run now, and its source. None if there is none, or if it cannot run: then it is answered here."""
        with self._lock:
            request, self._request = self._request, None
        if request is None or not request.begin():
            return None
        found = self._source
        if found is None or found.order.round.epoch != request.epoch:
            request.finish(
                Overwritten(begun=False), _untouched(WrongState("not holding that round's source", "commit"))
            )
            return None
        self._source = None
        return request, found

    def close(self) -> None:
        """The staging thread ends: answer the request that waits, and refuse later ones."""
        with self._lock:
            self._closed, request, self._request = True, self._request, None
        if request is not None:
            request.finish(
                Overwritten(begun=False), _untouched(ChannelClosed("the rank's staging thread has ended"))
            )
        self.release_source()


class _NotingReading:
    """A reading that notes whether it has begun to write, and calls `on_first` after its first read."""

    def __init__(self, reading: Reading, on_first: Callable[[], None]) -> None:
        self.rows: Table = reading.rows
        self.overlaps = False  # live weights are digested once all of them are there
        self._reading, self._on_first = reading, on_first
        self._notified = threading.Lock()
        self.begun = False

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """See Reading."""
        self.begun = True
        self._reading.read(first, last, go_on)
        if self._notified.acquire(blocking=False):  # never released, so that it is called once
            self._on_first()

    def check(self) -> None:
        """See Reading."""
        self._reading.check()

    def end(self) -> None:
        """See Reading."""
        self._reading.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwriter:
    """Runs a rank's overwrite requests, in the staging thread."""

    rank: int
    replica: str
    target: Target
    digest: ShadowDigest
    copy_threads: CopyThreads
    bus: Bus
    settings: InPlaceSettings

    def run(self, request: OverwriteRequest, found: LocatedSource, stop: Stop) -> Fault | None:
        """Overwrite, digest the live weights if the round is verified, and finish the request. Returns the fault, if it failed."""
        facts = self._facts(found.order)
        reading = _NotingReading(
            found.reading, lambda: self.bus.emit(events.OverwritingBegan(**facts, rank=self.rank))
        )
        done, fault = Overwritten(begun=False), None
        try:
            done = self._overwrite(request, found, reading, stop)
            done = self._verified(request, found.order, done, stop)
        except (
            Exception
        ) as error:  # of the source, or foreign: it is reported, and ends this round, not the rank
            ours = (
                error
                if isinstance(error, LiveWeightError)
                else Unavailable(f"{type(error).__name__}: {error}")
            )
            waited_s = request.deadline.waited_s()
            fault = fault_of(ours, step="commit", rank=self.rank, waited_s=waited_s)
        finally:
            if not reading.begun:
                found.reading.end()  # may be called twice
            request.finish(msgspec.structs.replace(done, begun=reading.begun), fault)
        return fault

    def _overwrite(
        self, request: OverwriteRequest, found: LocatedSource, reading: _NotingReading, stop: Stop
    ) -> Overwritten:
        self.settings.synchronise()
        order = found.order
        self.bus.emit(events.StagingBegan(**self._facts(order), rank=self.rank))
        done = stage(
            reading,
            copy_threads=self.copy_threads,
            pace_bytes_per_s=None,  # nothing decodes meanwhile
            stop=stop,
            deadline=request.deadline,
            ends=self.settings.ends(reading.rows, found.layout),
        )
        if isinstance(done, StagingStopped):
            raise RoundAborted("the round was given up while its weights were overwritten")
        self.settings.synchronise()
        self.bus.emit(
            events.RankStaged(
                **self._facts(order), rank=self.rank, size_bytes=done.size_bytes, took_s=done.seconds
            )
        )
        return Overwritten(begun=True, size_bytes=done.size_bytes, stage_s=done.seconds)

    def _verified(
        self, request: OverwriteRequest, order: Stage, done: Overwritten, stop: Stop
    ) -> Overwritten:
        if not order.verify:
            return done
        began_s = time.monotonic()
        lanes = self.digest.of(
            self.target.live(), copy_threads=self.copy_threads, stop=stop, deadline=request.deadline
        )
        if isinstance(lanes, StagingStopped):
            raise RoundAborted("the round was given up while its weights were verified")
        verify_s = time.monotonic() - began_s
        self.bus.emit(events.RankVerified(**self._facts(order), rank=self.rank, took_s=verify_s))
        return msgspec.structs.replace(done, verify_s=verify_s, lanes=lanes_to_bytes(lanes))

    def _facts(self, order: Stage) -> events.RoundFacts:
        return round_facts(self.replica, order)


def round_facts(replica: str, order: Stage) -> events.RoundFacts:
    """The fields that all events of a round have."""
    return {
        "replica": replica,
        "round": f"{order.round.boot}/{order.round.epoch}",
        "version": str(order.version),
    }


def _untouched(error: LiveWeightError) -> Fault:
    return fault_of(error, step="commit")
