"""A rank's side of the engine's sleep: writes its weights, releases memory, reads the weights again. For the rank's main thread.

Memory keeps its addresses; only its pages go. So pointers to weights and cache stay valid, and weights are read back to where they
were. They are compared with digests taken before; no step may run until they are the same. Which calls sleep is serving/sleeping's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.device import Device
from liveweight.devices.memory import Memory
from liveweight.engine.serving.step_stream import (
    ReleaseMemory,
    RestoreMemory,
    SaveImage,
    SleepEntry,
    SleepStepDone,
)
from liveweight.errors import DigestMismatch, LiveWeightError, Unavailable, WrongState
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import Lanes
from liveweight.spec.region import count
from liveweight.transports.registry import TRANSPORTS
from liveweight.transports.snapshot.disk.writer import Image, RankWriter, WriteSettings
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import fault_of
from liveweight.worker.commit import Hook
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.staging import stage

if TYPE_CHECKING:
    from liveweight.worker.targets.torch_target import TensorTarget

Fence = Callable[[Deadline], AbstractContextManager[None]]
"""Entered while live weights change: nobody stages then, and readers of live weights notice."""


@dataclass(slots=True, kw_only=True)
class RankSleep:
    """Sleep of one rank. `cache` gives the memory of its keys and values; `secret` is for the readers; `hooks` run after the restore."""

    rank: int
    target: TensorTarget
    device: Device
    threads: int
    secret: Secret
    hooks: Sequence[Hook]
    cache: Callable[[], Sequence[Memory]]
    fence: Fence
    _lanes: Lanes | None = None

    def carry_out(self, entry: SleepEntry, weights: str) -> SleepStepDone:
        """Carry the entry out; a failure goes into the answer. The engine compares the answers of all ranks."""
        deadline = Deadline.after(entry.timeout_s)
        try:
            match entry:
                case SaveImage():
                    size_bytes = self._save(entry, deadline)
                case ReleaseMemory():
                    size_bytes = self._release(entry, deadline)
                case RestoreMemory():
                    size_bytes = self._restore(entry, deadline)
        except Exception as error:  # whatever it is, the engine waits for an answer
            ours = (
                error
                if isinstance(error, LiveWeightError)
                else Unavailable(f"{type(error).__name__}: {error}")
            )
            return SleepStepDone(weights, fault=fault_of(ours, step="sleep", rank=self.rank))
        return SleepStepDone(weights, size_bytes)

    def _save(self, entry: SaveImage, deadline: Deadline) -> int:
        self.device.give_back(())  # a device that cannot raises here, before anything is done
        self._lanes = self._digested(deadline)
        image = Image(layout=self.target.layout, memories=self.target.live(), device=self.device)
        manifest = RankWriter(
            Path(entry.directory),
            image,
            snapshot=entry.snapshot,
            rank=self.rank,
            settings=WriteSettings(durable=False),
            stop=lambda: deadline.over,
        ).write()
        if deadline.over:
            raise deadline.exceeded(f"rank {self.rank} to write its weights")
        return getattr(manifest, "size_bytes", 0)

    def _release(self, entry: ReleaseMemory, deadline: Deadline) -> int:
        size_bytes = 0
        if entry.kv_cache:
            size_bytes += self.device.give_back(self.cache())
        if entry.weights:
            with self.fence(deadline):
                size_bytes += self.device.give_back(self._emptied())
        return size_bytes

    def _emptied(self) -> list[Memory]:
        """All memory that a round writes whole, live and shadow. What it leaves as it is, such as padding, stays."""
        layout = self.target.layout
        covered = [0] * len(layout.memories_bytes)
        specs = layout.specs()
        for placement in layout.placements:
            covered[placement.memory] += count(placement.region) * specs[placement.name].dtype.size_bytes
        whole = [number for number, size in enumerate(layout.memories_bytes) if covered[number] >= size]
        live, shadow = self.target.live(), self.target.idle()
        return [side[number] for side in (live, shadow) if side for number in whole]

    def _restore(self, entry: RestoreMemory, deadline: Deadline) -> int:
        if self._lanes is None:
            raise WrongState("awake since it was started", "taking weights back")
        kernels, layout = self.device.choose().kernels, self.target.layout
        reader = TRANSPORTS[entry.offer.mode].reader(self.secret, kernels, self.device)
        try:
            with self.fence(deadline), CopyThreads(self.threads) as copy_threads:
                reading = reader.bind(entry.offer, layout, self.target.live(), deadline)
                done = stage(
                    reading,
                    copy_threads=copy_threads,
                    pace_bytes_per_s=None,
                    stop=lambda: False,
                    deadline=deadline,
                )
            self._compare(self._digested(deadline))
            for hook in self.hooks:
                hook()
        finally:
            reader.close()
        return getattr(done, "size_bytes", 0)

    def _compare(self, found: Lanes) -> None:
        layout, wanted = self.target.layout, self._lanes
        if wanted is None:
            return
        differing = [
            placement.name
            for placement, one, other in zip(layout.placements, wanted, found, strict=True)
            if (one != other).any()
        ]
        if differing:
            raise DigestMismatch(differing, f"rank {self.rank}, after it woke up")

    def _digested(self, deadline: Deadline) -> Lanes:
        digest = ShadowDigest(self.target.layout, self.device.choose().kernels)
        with CopyThreads(self.threads) as copy_threads:
            return digest.all_of(self.target.live(), copy_threads=copy_threads, deadline=deadline)
