"""Sleeping: an engine gives the memory of its weights, of its cache, or of both back, and takes it again; requests stand still meanwhile.

Weights are written to files first, as a snapshot, and read from there through the registry of transfer modes; each rank compares what it
read with what it had. Requests lose nothing: those that ran are filled again. Whatever fails on the way to sleep leaves the engine awake;
whatever fails on the way back leaves it asleep, to be tried again. It never runs a step on what is not there.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from liveweight.engine.serving.engine_loop import EngineLoop
from liveweight.engine.serving.pauses import Pauses
from liveweight.engine.serving.step_stream import Nap, ReleaseMemory, RestoreMemory, SaveImage
from liveweight.engine.updates.leader_client import LeaderClient
from liveweight.errors import LiveWeightError, WrongState
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.transports.snapshot.disk.atomic_files import out_of_space
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.offer_record import offer_of

Tag: TypeAlias = Literal["weight", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)
ANSWER_S = 10.0
MARGIN_S = 30.0
"""How much longer than the ranks the engine waits: their own word on a deadline is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepResult:
    """What is asleep now, what this call changed, how many bytes all ranks gave back or read, and how long it took."""

    asleep: tuple[Tag, ...]
    changed: tuple[Tag, ...]
    size_bytes: int
    took_s: float


class EngineSleep:
    """One engine's. For any thread; one call at a time, a second is refused."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        pauses: Pauses,
        leader_client: LeaderClient | None,
        *,
        world: int,
        start: Version,
        place: str | None,
    ) -> None:
        """`place` is the directory below which weights are written; None: the system's for temporary files."""
        self._engine_loop, self._pauses, self._leader_client = engine_loop, pauses, leader_client
        self._world, self._start, self._place = world, start, place
        self._busy = threading.Lock()
        self._asleep: frozenset[Tag] = frozenset()
        self._image: Path | None = None

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """What is asleep now, in the order of the tags."""
        asleep = self._asleep
        return tuple(tag for tag in TAGS if tag in asleep)

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Give these back; what is asleep stays so. RoundOpen while a round is open; DeadlineExceeded, OutOfSpace and the like leave
        the engine as it was, but where a rank failed when others had given weights back: then it is asleep, and can be woken up."""
        with self._alone("sleep"):
            began_s, deadline = time.monotonic(), Deadline.after(timeout_s)
            changed = frozenset(tags) - self._asleep
            size_bytes = 0
            if changed:
                version = self._version()
                self._tell(changed, asleep=True)
                try:
                    self._prepare(changed, version, deadline)
                except BaseException:
                    self._go_back(changed)
                    raise
                size_bytes = self._give_back(changed, deadline)
            return self._told(changed, size_bytes, began_s)

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Take these back; requests go on when nothing is asleep any more. What is awake stays so. Errors leave it asleep."""
        with self._alone("wake up"):
            began_s, deadline = time.monotonic(), Deadline.after(timeout_s)
            changed = frozenset(tags) & self._asleep
            size_bytes = 0
            if "weight" in changed and self._image is not None:
                with OpenSnapshot(self._image) as snapshot:
                    size_bytes = self._ask(RestoreMemory(offer_of(snapshot), deadline.remaining_s()))
                self._drop_image()
            if changed:
                self._tell(changed, asleep=False)
                self._asleep -= changed
                if not self._asleep:
                    self._pauses.wake_up()
            return self._told(changed, size_bytes, began_s)

    def drop_cache(self, timeout_s: float) -> int:
        """Give the cache's memory back for a moment, between two steps: requests that run are filled again. So many bytes."""
        with self._alone("drop the cache"):
            if self._asleep:
                raise WrongState("asleep", "drop the cache")
            deadline = Deadline.after(timeout_s)
            try:
                self._pauses.fall_asleep(deadline)
                return self._forget_cache(ReleaseMemory(False, True, max(ANSWER_S, deadline.remaining_s())))
            finally:
                self._pauses.wake_up()

    def close(self) -> None:
        """Leave no files."""
        self._drop_image()

    def _prepare(self, changed: frozenset[Tag], version: Version, deadline: Deadline) -> None:
        """All that can fail without harm."""
        self._pauses.fall_asleep(deadline)
        if "weight" in changed:
            self._save(version, deadline)

    def _give_back(self, changed: frozenset[Tag], deadline: Deadline) -> int:
        """From here on weights count as gone: where one rank fails, others may have given theirs back."""
        self._asleep |= changed
        order = ReleaseMemory(
            "weight" in changed, "kv_cache" in changed, max(ANSWER_S, deadline.remaining_s())
        )
        try:
            return self._forget_cache(order) if order.kv_cache else self._ask(order)
        except BaseException:
            if not order.weights:  # a cache that was forgotten may be there or not
                self._asleep -= changed
                self._go_back(changed)
            raise

    def _forget_cache(self, order: ReleaseMemory) -> int:
        """Nobody finds or has a page any more before the ranks give them back."""
        with self._engine_loop.lock:
            scheduler = self._engine_loop.scheduler
            scheduler.change(scheduler.weights, "recompute")
            scheduler.pool.forget()
        return self._ask(order)

    def _save(self, version: Version, deadline: Deadline) -> None:
        """Every rank's weights, in one snapshot that exists only if all have written theirs."""
        try:
            root = Path(tempfile.mkdtemp(prefix="liveweight-asleep-", dir=self._place))
        except OSError as error:
            raise out_of_space(Path(self._place or tempfile.gettempdir()), error) from error
        try:
            with Store(root).begin(str(version.label)) as begun:
                self._ask(SaveImage(str(begun.path), begun.snapshot, deadline.remaining_s()))
                begun.commit(version, ranks=self._world, durable=False)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        self._image = begun.path

    def _ask(self, entry: Nap) -> int:
        """All ranks' answers to an entry: the bytes of all; the first one's fault is raised."""
        answers, waiting = self._engine_loop.send_between(entry), Deadline.after(entry.timeout_s + MARGIN_S)
        try:
            said = answers.result(waiting.remaining_s())
        except FutureTimeout:
            raise waiting.exceeded(f"the ranks to answer {type(entry).__name__}") from None
        for answer in said:
            if answer.fault is not None:
                raise answer.fault.to_error()
        return sum(answer.size_bytes for answer in said)

    def _go_back(self, changed: frozenset[Tag]) -> None:
        """Sleep did not come: nothing was given back, and requests go on if nothing else sleeps."""
        if "weight" in changed:
            self._drop_image()
        with suppress(LiveWeightError):  # a leader that is gone ended with the engine
            self._tell(changed, asleep=False)
        if not self._asleep:
            self._pauses.wake_up()

    def _tell(self, tags: frozenset[Tag], *, asleep: bool) -> None:
        """The leader, which refuses rounds meanwhile; before memory goes, and after it is back."""
        if self._leader_client is not None:
            weights, kv_cache = "weight" in tags, "kv_cache" in tags
            self._leader_client.rest(asleep=asleep, weights=weights, kv_cache=kv_cache, timeout_s=ANSWER_S)

    def _version(self) -> Version:
        serving = self._start if self._leader_client is None else self._leader_client.update_status().serving
        return Version(run=self._start.run, label="unnamed") if serving is None else serving

    def _drop_image(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            shutil.rmtree(image.parent, ignore_errors=True)

    def _told(self, changed: frozenset[Tag], size_bytes: int, began_s: float) -> SleepResult:
        return SleepResult(
            asleep=self.asleep,
            changed=tuple(tag for tag in TAGS if tag in changed),
            size_bytes=size_bytes,
            took_s=time.monotonic() - began_s,
        )

    @contextmanager
    def _alone(self, command: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise WrongState("falling asleep or waking up", command)
        try:
            yield
        finally:
            self._busy.release()
