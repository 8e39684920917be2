"""Sleep of an engine: it releases the memory of its weights, of its cache, or of both, and restores it later; requests pause meanwhile.

Weights are written to files first, as a snapshot, and read back over the snapshot transfer mode; each rank compares what it read with
what it had (rank/sleep). Requests lose nothing: those that ran are filled again. If falling asleep fails, the engine stays awake; if
waking up fails, it stays asleep, and the call can be repeated. No step ever runs on released memory.
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
from liveweight.engine.serving.step_stream import ReleaseMemory, RestoreMemory, SaveImage, SleepEntry
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
"""How much longer than the ranks the engine waits: their own error names what they waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepResult:
    """What is asleep now, what this call changed, how many bytes all ranks released or read, and how long it took."""

    asleep: tuple[Tag, ...]
    changed: tuple[Tag, ...]
    size_bytes: int
    took_s: float


class EngineSleep:
    """Sleep of one engine. For any thread; one call at a time, a second is refused."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        pauses: Pauses,
        leader_client: LeaderClient | None,
        *,
        world: int,
        start: Version,
        directory: str | None,
    ) -> None:
        """Weights are written below `directory`; None: the system's directory for temporary files."""
        self._engine_loop, self._pauses, self._leader_client = engine_loop, pauses, leader_client
        self._world, self._start, self._directory = world, start, directory
        self._busy = threading.Lock()
        self._asleep: frozenset[Tag] = frozenset()
        self._image: Path | None = None

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """What is asleep now, in the order of the tags."""
        asleep = self._asleep
        return tuple(tag for tag in TAGS if tag in asleep)

    def sleep(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Release these; what is asleep stays so. RoundOpen while a round is open. After DeadlineExceeded, OutOfSpace and the like the
        engine is as before, unless a rank failed when others had released weights: then it is asleep, and can be woken up."""
        with self._exclusive("sleep"):
            began_s, deadline = time.monotonic(), Deadline.after(timeout_s)
            changed = frozenset(tags) - self._asleep
            size_bytes = 0
            if changed:
                version = self._version()
                self._notify_leader(changed, asleep=True)
                try:
                    self._prepare(changed, version, deadline)
                except BaseException:
                    self._cancel_sleep(changed)
                    raise
                size_bytes = self._release(changed, deadline)
            return self._result(changed, size_bytes, began_s)

    def wake(self, tags: Collection[Tag], timeout_s: float) -> SleepResult:
        """Restore these; requests go on when nothing is asleep any more. What is awake stays so. After an error it is still asleep."""
        with self._exclusive("wake up"):
            began_s, deadline = time.monotonic(), Deadline.after(timeout_s)
            changed = frozenset(tags) & self._asleep
            size_bytes = 0
            if "weight" in changed and self._image is not None:
                with OpenSnapshot(self._image) as snapshot:
                    size_bytes = self._send_entry(RestoreMemory(offer_of(snapshot), deadline.remaining_s()))
                self._drop_image()
            if changed:
                self._notify_leader(changed, asleep=False)
                self._asleep -= changed
                if not self._asleep:
                    self._pauses.wake_up()
            return self._result(changed, size_bytes, began_s)

    def drop_cache(self, timeout_s: float) -> int:
        """Release the cache's memory for a moment, between two steps: running requests are filled again. Returns the bytes."""
        with self._exclusive("drop the cache"):
            if self._asleep:
                raise WrongState("asleep", "drop the cache")
            deadline = Deadline.after(timeout_s)
            try:
                self._pauses.fall_asleep(deadline)
                return self._forget_cache(ReleaseMemory(False, True, max(ANSWER_S, deadline.remaining_s())))
            finally:
                self._pauses.wake_up()

    def close(self) -> None:
        """Delete the files."""
        self._drop_image()

    def _prepare(self, changed: frozenset[Tag], version: Version, deadline: Deadline) -> None:
        """The steps that can fail and be undone: pause requests, write the weights."""
        self._pauses.fall_asleep(deadline)
        if "weight" in changed:
            self._save(version, deadline)

    def _release(self, changed: frozenset[Tag], deadline: Deadline) -> int:
        """Let the ranks release memory. From here on weights count as gone: if one rank fails, others may have released theirs."""
        self._asleep |= changed
        order = ReleaseMemory(
            "weight" in changed, "kv_cache" in changed, max(ANSWER_S, deadline.remaining_s())
        )
        try:
            return self._forget_cache(order) if order.kv_cache else self._send_entry(order)
        except BaseException:
            if (
                not order.weights
            ):  # whether the cache's memory was released does not matter: nothing in it is used
                self._asleep -= changed
                self._cancel_sleep(changed)
            raise

    def _forget_cache(self, order: ReleaseMemory) -> int:
        """Make the scheduler forget all pages, then let the ranks release them."""
        with self._engine_loop.lock:
            scheduler = self._engine_loop.scheduler
            scheduler.change(scheduler.weights, "recompute")
            scheduler.pool.forget()
        return self._send_entry(order)

    def _save(self, version: Version, deadline: Deadline) -> None:
        """Write every rank's weights to one snapshot, which exists only if all ranks have written."""
        try:
            root = Path(tempfile.mkdtemp(prefix="liveweight-asleep-", dir=self._directory))
        except OSError as error:
            raise out_of_space(Path(self._directory or tempfile.gettempdir()), error) from error
        try:
            with Store(root).begin(str(version.label)) as draft:
                self._send_entry(SaveImage(str(draft.path), draft.snapshot, deadline.remaining_s()))
                draft.commit(version, ranks=self._world, durable=False)
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        self._image = draft.path

    def _send_entry(self, entry: SleepEntry) -> int:
        """Send an entry to all ranks; returns the sum of their bytes, or raises the first fault."""
        answers, waiting = self._engine_loop.send_between(entry), Deadline.after(entry.timeout_s + MARGIN_S)
        try:
            results = answers.result(waiting.remaining_s())
        except FutureTimeout:
            raise waiting.exceeded(f"the ranks to answer {type(entry).__name__}") from None
        for answer in results:
            if answer.fault is not None:
                raise answer.fault.to_error()
        return sum(answer.size_bytes for answer in results)

    def _cancel_sleep(self, changed: frozenset[Tag]) -> None:
        """Falling asleep failed before memory was released: requests go on if nothing else sleeps."""
        if "weight" in changed:
            self._drop_image()
        with suppress(LiveWeightError):  # the leader ends with the engine
            self._notify_leader(changed, asleep=False)
        if not self._asleep:
            self._pauses.wake_up()

    def _notify_leader(self, tags: frozenset[Tag], *, asleep: bool) -> None:
        """Tell the leader, which refuses rounds while weights sleep; before memory is released, and after it is restored."""
        if self._leader_client is not None:
            weights, kv_cache = "weight" in tags, "kv_cache" in tags
            self._leader_client.note_sleep(
                asleep=asleep, weights=weights, kv_cache=kv_cache, timeout_s=ANSWER_S
            )

    def _version(self) -> Version:
        serving = self._start if self._leader_client is None else self._leader_client.update_status().serving
        return Version(run=self._start.run, label="unnamed") if serving is None else serving

    def _drop_image(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            shutil.rmtree(image.parent, ignore_errors=True)

    def _result(self, changed: frozenset[Tag], size_bytes: int, began_s: float) -> SleepResult:
        return SleepResult(
            asleep=self.asleep,
            changed=tuple(tag for tag in TAGS if tag in changed),
            size_bytes=size_bytes,
            took_s=time.monotonic() - began_s,
        )

    @contextmanager
    def _exclusive(self, command: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise WrongState("falling asleep or waking up", command)
        try:
            yield
        finally:
            self._busy.release()
