"""Successors: engines in the place of one that lost a rank, started anew and brought back to its version.

Owns the processes that are being started, so that they can be ended from outside, and the word that everything is to end.
"""

from __future__ import annotations

import socket
import threading

import msgspec

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.recovery.restoring import RestoredVersion, VersionRestorer
from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.engine.status import RecoveryStatus
from liveweight.errors import EngineStopping, RankLost
from liveweight.observe.bus import Bus
from liveweight.spec.manifest import Version
from liveweight.spec.version_age import older
from liveweight.wire.waker import Waker

PAUSE_S = 30.0


class ReplacementEngines:
    """Makes one engine after the other, all with the same configuration, at the same address. Used by one thread; `end`, `kill` and
    `ending` are for any."""

    def __init__(self, config: EngineConfig, launch: Launch, bus: Bus) -> None:
        self.config, self._launch_one, self._bus = config, launch, bus
        self._processes: list[RankProcess] = []
        self._ending, self._cancel = threading.Event(), Waker()

    @property
    def ending(self) -> bool:
        """Whether no other is to be made."""
        return self._ending.is_set()

    def first(self) -> Engine:
        """The one that all others come after: they are reached where it is, also if its address was left open."""
        engine, updates = self._started(), self.config.updates
        if updates is not None and engine.address is not None:
            found = msgspec.structs.replace(updates, address=engine.address)
            self.config = msgspec.structs.replace(self.config, updates=found)
        return engine

    def next(self, wanted: Version | None, *, paused: bool) -> tuple[Engine, RestoredVersion]:
        """Another one, which holds that version or the next best, and has served nobody."""
        engine = self._started()
        try:
            restored = self.restored(engine, wanted)
            if paused:
                engine.pause("keep", PAUSE_S)
        except BaseException:
            engine.stop()
            raise
        return engine, restored

    def restored(self, engine: Engine, wanted: Version | None) -> RestoredVersion:
        """Bring an engine that was just started to a version; None: the newest that is there.

        Where requests are to wait for a publisher, they do unless it is the version that the engine had.
        """
        restored = VersionRestorer(
            engine=engine, wanted=wanted, pause=self.wait, cancel=self._cancel
        ).restore()
        if self.config.await_weights and (wanted is None or behind_of(restored, wanted) is not None):
            engine.await_weights(f"it came back with {restored.version}, and a publisher may be further")
        return restored

    def wait(self, seconds: float) -> None:
        """Wait for so long; EngineStopping where it is to end."""
        if self._ending.wait(seconds):
            raise EngineStopping("the engine is being stopped")

    def end(self) -> None:
        """Make no other; what waits here ends."""
        self._ending.set()
        self._cancel.wake()

    def kill(self) -> None:
        """End the ranks that were started last, so that nobody waits for their start."""
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        """Let go. Twice is fine."""
        self._cancel.close()

    def _started(self) -> Engine:
        self._processes = []
        try:
            return Engine(self.config, launch=self._launch, bus=self._bus)
        except OSError as error:
            raise RankLost(f"ranks cannot be started: {error}") from error

    def _launch(self, rank: int, end: socket.socket) -> RankProcess:
        process = self._launch_one(rank, end)
        self._processes.append(process)
        return process


def behind_of(restored: RestoredVersion, wanted: Version | None) -> Version | None:
    """The version that is missed: what a source or a publisher gave is as new as anything, unless it is known to be older."""
    if wanted is None or restored.version == wanted:
        return None
    if restored.origin in ("offer", "publisher"):
        return wanted if older(restored.version, wanted) else None
    return wanted


def missed(before: RecoveryStatus | None, served: Version | None) -> Version | None:
    """What a replica should serve: what it served, or, if that was behind already, what was missed then."""
    if before is None or before.behind is None or before.version != served:
        return served
    return before.behind
