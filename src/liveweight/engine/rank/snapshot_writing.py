"""A rank's side of snapshot saving (recovery/snapshot_saving): writes the live weights, in a thread of its own, while the rank serves.

Live memory changes only at a swap. Written bytes are valid only if no swap came meanwhile: the writer compares the count of swaps before
the first byte and after the last byte of every part file. No swap waits for a writer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.device import Device
from liveweight.engine.config import Snapshots
from liveweight.engine.recovery.snapshot_messages import (
    RankNoted,
    RankPresent,
    SavingMessage,
    SnapshotNotWritten,
    SnapshotWritten,
    StopWriting,
    WriteSnapshot,
)
from liveweight.errors import ChannelClosed, DeadlineExceeded, LiveWeightError, Unavailable, WeightsExchanged
from liveweight.spec.deadline import Deadline
from liveweight.transports.snapshot.disk.writer import Image, RankWriter, WriteSettings, WritingCancelled
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import fault_of
from liveweight.worker.staging import Pace
from liveweight.worker.targets.target import Target

IDLE_S = 60.0
SEND_S = 5.0
SETTLE_S = 5.0
"""How long a rank may take to learn of a commit that the engine knows of."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The name of a rank's live weights, and the count of swaps for which it is valid."""

    weights: str
    swaps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWeights:
    """A rank's live weights: where they are, their name as of the last swap, and the count of swaps."""

    target: Target
    device: Device
    held: Callable[[], HeldVersion]
    swaps: Callable[[], int]


class RankSnapshotWriter:
    """Writes snapshots on the engine's request. Construct and close from the rank's main thread."""

    def __init__(
        self,
        snapshots: Snapshots,
        secret: Secret,
        live: LiveWeights,
        *,
        rank: int,
        pace_bytes_per_s: float | None,
        deadline: Deadline,
    ) -> None:
        self._snapshots, self._live, self._rank = snapshots, live, rank
        self._pace = None if pace_bytes_per_s is None else Pace(pace_bytes_per_s)
        self._channel: Channel[SavingMessage] = Channel(
            snapshots.address, secret, Codec(SavingMessage), deadline=deadline
        )
        self._waker, self._closing = self._channel.waker(), threading.Event()
        self._stopped_up_to = -1
        self._next: WriteSnapshot | None = None
        try:
            self._channel.request(RankPresent(rank=rank), deadline, f"the engine to note rank {rank}")
        except BaseException:
            self._channel.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"liveweight-saving-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; it stops writing."""
        self._closing.set()
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        with self._channel:
            try:
                while not self._closing.is_set():
                    order, self._next = self._next, None
                    if order is None:
                        self._on_message(self._receive())
                    else:
                        self._channel.send(self._answer(order), Deadline.after(SEND_S))
            except (ChannelClosed, DeadlineExceeded):
                return  # the engine is gone, and the rank ends with it

    def _receive(self) -> SavingMessage | None:
        try:
            return self._channel.receive_or_wake(Deadline.after(IDLE_S), "the engine")
        except DeadlineExceeded:
            return None

    def _on_message(self, message: SavingMessage | None) -> None:
        match message:
            case WriteSnapshot():
                self._next = message
            case StopWriting(number=number):
                self._stopped_up_to = max(self._stopped_up_to, number)
            case None | RankNoted() | RankPresent() | SnapshotWritten() | SnapshotNotWritten():
                return

    def _answer(self, order: WriteSnapshot) -> SnapshotWritten | SnapshotNotWritten:
        fault = None
        try:
            done = self._write(order)
            if done is not None:
                return SnapshotWritten(number=order.number, rank=self._rank, size_bytes=done)
        except WeightsExchanged:
            pass
        except Exception as error:  # whatever it is, the engine waits for an answer
            ours = (
                error
                if isinstance(error, LiveWeightError)
                else Unavailable(f"{type(error).__name__}: {error}")
            )
            fault = fault_of(ours, step="snapshot", rank=self._rank)
        return SnapshotNotWritten(number=order.number, rank=self._rank, fault=fault)

    def _write(self, order: WriteSnapshot) -> int | None:
        """Write all files of this rank; returns their bytes, None after StopWriting. WeightsExchanged if it holds other weights by now."""
        held = self._wait_for_version(order)

        def check() -> None:
            if self._live.swaps() != held.swaps:
                raise WeightsExchanged(f"rank {self._rank} does not hold {order.weights} any more")

        manifest = RankWriter(
            Path(order.directory),
            self._image(check),
            snapshot=order.snapshot,
            rank=self._rank,
            settings=WriteSettings(part_bytes=self._snapshots.part_bytes),
            stop=lambda: self._should_stop(order.number) or self._live.swaps() != held.swaps,
            progress=self._wait_for_turn,
        ).write()
        return None if isinstance(manifest, WritingCancelled) else manifest.size_bytes

    def _wait_for_version(self, order: WriteSnapshot) -> HeldVersion:
        """Wait until the rank holds the ordered weights: the engine may know of a commit a moment before this rank's main thread."""
        soon = Deadline.after(SETTLE_S)
        while True:
            held = self._live.held()
            if held.weights == order.weights and held.swaps == self._live.swaps():
                return held
            if soon.over or self._should_stop(order.number):
                raise WeightsExchanged(f"rank {self._rank} holds {held.weights}, not {order.weights}")
            self._closing.wait(POLL_S)

    def _image(self, check: Callable[[], None]) -> Image:
        live = self._live
        try:
            memories = live.target.live()
        except LiveWeightError:
            check()  # in the middle of a swap tensors are not where they were
            raise
        return Image(layout=live.target.layout, memories=memories, device=live.device, check=check)

    def _should_stop(self, number: int) -> bool:
        """Whether the snapshot is not needed any more. Called between blocks, in this thread."""
        while (message := self._channel.receive_now()) is not None:
            self._on_message(message)
        return self._closing.is_set() or self._stopped_up_to >= number

    def _wait_for_turn(self, size_bytes: int) -> None:
        """Wait as the pace demands, so that decoding keeps its share."""
        if self._pace is not None:
            self._closing.wait(max(0.0, self._pace.reserve(size_bytes) - time.monotonic()))
