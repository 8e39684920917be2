"""The staging thread: the background thread of a rank that stages and verifies on the leader's orders.

Owns the rank's channel to the leader, the readers and the copy threads. It writes only into the shadow; the main thread makes the shadow
live, at a boundary. The thread that holds the shadow lock owns the shadow. In a rank without a shadow the staging thread locates the
source, and overwrites live weights when the main thread requests it (in_place_overwrite).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, DeadlineExceeded, LiveWeightError, Unavailable, WrongState
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.transports.port import Reader, Reading
from liveweight.wire.channel import Channel
from liveweight.wire.messages import (
    DigestLive,
    DropShadow,
    Message,
    ShadowDropped,
    Stage,
    Staged,
    StagingFailed,
    Verified,
)
from liveweight.wire.messages.values import RoundId, fault_of
from liveweight.worker.in_place_overwrite import LocatedSource, OverwriteQueue, Overwriter, round_facts
from liveweight.worker.kept_tensors import KeptTensors
from liveweight.worker.live_verification import LiveVerifier
from liveweight.worker.shadow_digest import Digesting, ShadowDigest
from liveweight.worker.shadow_lock import ShadowLock
from liveweight.worker.staging import StagingStopped, stage
from liveweight.worker.targets.target import Target

IDLE_S = 60.0
SEND_S = 5.0
ATTACH_S = 5.0
"""How long one attempt to attach may wait; then the staging thread checks whether the round is still open, and tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSettings:
    """What a round may cost the rank: threads, and bytes per second where decoding must keep its share."""

    threads: int = 1
    pace_bytes_per_s: float | None = None


class StagingThread:
    """Serves one rank until closed. Construct and close from the rank's main thread. A change of `settings` applies to the next round."""

    def __init__(
        self,
        *,
        rank: int,
        channel: Channel[Message],
        target: Target,
        digest: ShadowDigest,
        readers: Mapping[str, Reader],
        settings: StagingSettings,
        shadow_lock: ShadowLock,
        kernels: Kernels,
        replica: str,
        bus: Bus,
        overwrites: OverwriteQueue | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._rank, self._channel, self._target = rank, channel, target
        self._digest, self._readers, self.settings = digest, readers, settings
        self._shadow_lock, self._replica, self._bus, self._overwrites = shadow_lock, replica, bus, overwrites
        self._kept_tensors = KeptTensors(target)
        self._pending: deque[Message] = deque()
        self._closing, self._on_failure, self._waker = False, on_failure, channel.waker()
        self.failure: BaseException | None = None
        """Why the staging thread has ended, if not by `close`; the next boundary raises it, and `on_failure` is called on the staging
        thread."""
        self._live_verifier = LiveVerifier(
            rank=rank,
            target=target,
            kernels=kernels,
            shadow_lock=shadow_lock,
            pace_bytes_per_s=settings.pace_bytes_per_s,
            replica=replica,
            bus=bus,
            wake=self._waker.wake,
        )
        self._copy_threads = CopyThreads(settings.threads)
        if overwrites is not None:
            overwrites.wake = self._waker.wake
        self._thread = threading.Thread(target=self._run, name=f"liveweight-staging-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, stopping what it is staging."""
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        with self._channel, self._copy_threads:
            try:
                while not self._closing:
                    self._serve()
            except BaseException as error:  # nobody else would notice: the leader is gone, or this is a bug
                self.failure = error
            finally:
                if self._overwrites is not None:
                    self._overwrites.close()
                self._live_verifier.close()
                for reader in self._readers.values():
                    reader.close()
        if self.failure is not None and self._on_failure is not None:
            self._on_failure()

    def _serve(self) -> None:
        message = self._pending.popleft() if self._pending else self._receive()
        self._send_digests()
        match message:
            case DigestLive():
                self._live_verifier.submit(message)
            case Stage():
                self._round(message)
            case DropShadow(round=round_id):
                self._drop(round_id)
            case _:
                pass
        self._overwrite()  # after earlier messages: a round that was given up is not carried out

    def _receive(self) -> Message | None:
        try:
            return self._channel.receive_or_wake(Deadline.after(IDLE_S), "the leader")
        except DeadlineExceeded:
            return None

    def _round(self, order: Stage) -> None:
        """Stage and verify. A failure is reported to the leader and leaves the live weights as they are."""
        deadline = Deadline.after(order.timeout_s)
        step = "stage"
        try:
            with self._shadow_lock.for_staging(deadline):
                if order.unchanged:
                    self._shadow_lock.staged, self._shadow_lock.unchanged = order.round, True
                    self._send(Staged(round=order.round, rank=self._rank, size_bytes=0, seconds=0.0))
                    return
                if self._overwrites is not None:
                    self._locate(order, self._overwrites, deadline)
                    return
                shadow = self._target.shadow()
                self._kept_tensors.fill(order.keep)
                digesting = self._stage(order, shadow, deadline)
                if digesting is None:
                    return
                step = "verify"
                if order.verify and not self._verify(order, digesting, deadline):
                    return
                self._shadow_lock.staged = order.round
        except ChannelClosed as error:
            if self._channel_gone():
                raise
            self._report_failure(order, step, ChannelClosed(f"the source is gone: {error}"), deadline)
        except LiveWeightError as error:
            self._report_failure(order, step, error, deadline)
        except Exception as error:  # foreign: it is reported, and ends this round, not the rank
            self._report_failure(order, step, Unavailable(f"{type(error).__name__}: {error}"), deadline)

    def _locate(self, order: Stage, overwrites: OverwriteQueue, deadline: Deadline) -> None:
        """In place, before the vote: check that the source is there and is what was offered. It is read during the commit."""
        began_s = time.monotonic()
        overwrites.release_source()
        reading = self._bind(order, self._target.live(), deadline)
        if reading is None:
            return
        overwrites.keep_source(
            LocatedSource(order=order, reading=reading, layout=self._kept_tensors.layout(order.keep))
        )
        reading.check()
        self._shadow_lock.staged = order.round
        seconds = time.monotonic() - began_s
        self._send(Staged(round=order.round, rank=self._rank, size_bytes=0, seconds=seconds))

    def _overwrite(self) -> None:
        """Run the main thread's request, if there is one."""
        if self._overwrites is None or (taken := self._overwrites.take()) is None:
            return
        overwriter = Overwriter(
            rank=self._rank,
            replica=self._replica,
            target=self._target,
            digest=self._digest,
            copy_threads=self._copy_threads,
            bus=self._bus,
            settings=self._overwrites.settings,
        )
        request, found = taken
        order = found.order
        if overwriter.run(request, found, lambda: self._stop(order.round)) is not None:
            self._readers[order.offer.mode].forget(order.offer.source)

    def _stage(self, order: Stage, shadow: Sequence[Memory], deadline: Deadline) -> Digesting | None:
        began_s = time.monotonic()
        reading = self._bind(order, shadow, deadline)
        if reading is None:
            return None
        self._bus.emit(events.StagingBegan(**self._facts(order), rank=self._rank))
        digesting = self._digest.begin(
            reading, shadow, self._copy_threads, ahead=order.verify and reading.overlaps
        )
        done = stage(
            reading,
            copy_threads=self._copy_threads,
            pace_bytes_per_s=self.settings.pace_bytes_per_s,
            stop=lambda: self._stop(order.round),
            deadline=deadline,
            concurrent=digesting.concurrent,
        )
        if isinstance(done, StagingStopped):
            return None
        seconds = time.monotonic() - began_s
        self._send(Staged(round=order.round, rank=self._rank, size_bytes=done.size_bytes, seconds=seconds))
        self._bus.emit(
            events.RankStaged(
                **self._facts(order), rank=self._rank, size_bytes=done.size_bytes, took_s=seconds
            )
        )
        return digesting

    def _bind(self, order: Stage, memories: Sequence[Memory], deadline: Deadline) -> Reading | None:
        """Attach to the source. None if the round was given up meanwhile."""
        reader = self._readers.get(order.offer.mode)
        if reader is None:
            raise WrongState(
                f"a rank that reads {', '.join(self._readers)}", f"transfer mode {order.offer.mode}"
            )
        while not self._stop(order.round):
            try:
                layout = self._kept_tensors.layout(order.keep)
                return reader.bind(order.offer, layout, memories, deadline.within(ATTACH_S))
            except DeadlineExceeded:
                if deadline.over:
                    raise
        return None

    def _verify(self, order: Stage, digesting: Digesting, deadline: Deadline) -> bool:
        began_s = time.monotonic()
        lanes = digesting.finish(stop=lambda: self._stop(order.round), deadline=deadline)
        if isinstance(lanes, StagingStopped):
            return False
        seconds = time.monotonic() - began_s
        self._send(Verified(round=order.round, rank=self._rank, lanes=lanes_to_bytes(lanes), seconds=seconds))
        self._bus.emit(events.RankVerified(**self._facts(order), rank=self._rank, took_s=seconds))
        return True

    def _stop(self, round_id: RoundId) -> bool:
        """Whether the round was given up meanwhile. Called by staging and verifying, in this thread."""
        while (message := self._channel.receive_now()) is not None:
            if isinstance(message, DigestLive):  # during the round, not after it
                self._live_verifier.submit(message)
            else:
                self._pending.append(message)
        self._send_digests()
        return self._closing or any(isinstance(m, DropShadow) and m.round == round_id for m in self._pending)

    def _send_digests(self) -> None:
        for answer in self._live_verifier.answers():
            self._send(answer)

    def _drop(self, round_id: RoundId) -> None:
        if self._overwrites is not None:
            self._overwrites.release_source(round_id)
        with self._shadow_lock.lock:
            if self._shadow_lock.staged == round_id:
                self._shadow_lock.staged = None
        self._send(ShadowDropped(round=round_id, rank=self._rank))

    def _report_failure(self, order: Stage, step: str, error: LiveWeightError, deadline: Deadline) -> None:
        if self._overwrites is not None:
            self._overwrites.release_source()
        for reader in self._readers.values():
            reader.forget(order.offer.source)
        fault = fault_of(error, step=step, rank=self._rank, waited_s=deadline.waited_s())
        self._send(StagingFailed(round=order.round, fault=fault))

    def _send(self, message: Message) -> None:
        self._channel.send(message, Deadline.after(SEND_S))

    def _channel_gone(self) -> bool:
        try:
            message = self._channel.receive_now()
        except ChannelClosed:
            return True
        if message is not None:
            self._pending.append(message)
        return False

    def _facts(self, order: Stage) -> events.RoundFacts:
        return round_facts(self._replica, order)
