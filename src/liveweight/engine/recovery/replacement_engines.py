"""Replacement engines: each is started in place of an engine that lost a rank, and brought back to its version.

Owns the rank processes that are being started, so that another thread can kill them, and the flag that ends everything here.
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

PAUSE_TIMEOUT_S = 30.0


class ReplacementEngines:
    """Starts one engine after the other, all with the same configuration, at the same address. Used by one thread; any thread may use
    `end`, `kill` and `ending`."""

    def __init__(self, config: EngineConfig, launch: Launch, bus: Bus) -> None:
        self.config, self._launch_rank, self._bus = config, launch, bus
        self._processes: list[RankProcess] = []
        self._ending, self._cancel = threading.Event(), Waker()

    @property
    def ending(self) -> bool:
        """Whether no further engine will be started."""
        return self._ending.is_set()

    def first(self) -> Engine:
        """Start the first engine. All others listen at its address, also if the configuration left the port open."""
        engine, updates = self._start(), self.config.updates
        if updates is not None and engine.address is not None:
            found = msgspec.structs.replace(updates, address=engine.address)
            self.config = msgspec.structs.replace(self.config, updates=found)
        return engine

    def next(self, wanted: Version | None, *, paused: bool) -> tuple[Engine, RestoredVersion]:
        """Start another engine and restore that version, or the next best, before it serves anybody."""
        engine = self._start()
        try:
            restored = self.restore(engine, wanted)
            if paused:
                engine.pause("keep", PAUSE_TIMEOUT_S)
        except BaseException:
            engine.stop()
            raise
        return engine, restored

    def restore(self, engine: Engine, wanted: Version | None) -> RestoredVersion:
        """Bring a freshly started engine to a version; None: the newest that can be found.

        With `await_weights`, requests wait for a publisher unless the engine got the version that it had.
        """
        restored = VersionRestorer(
            engine=engine, wanted=wanted, pause=self.wait, cancel=self._cancel
        ).restore()
        if self.config.await_weights and (wanted is None or behind_of(restored, wanted) is not None):
            engine.await_weights(f"it came back with {restored.version}, and a publisher may be further")
        return restored

    def wait(self, seconds: float) -> None:
        """Wait; raises EngineStopping after `end`."""
        if self._ending.wait(seconds):
            raise EngineStopping("the engine is being stopped")

    def end(self) -> None:
        """Start no further engine; waits in this class end."""
        self._ending.set()
        self._cancel.wake()

    def kill(self) -> None:
        """Kill the ranks that were started last, so that nobody waits for their start."""
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        """Close the waker. Twice is fine."""
        self._cancel.close()

    def _start(self) -> Engine:
        self._processes = []
        try:
            return Engine(self.config, launch=self._launch, bus=self._bus)
        except OSError as error:
            raise RankLost(f"ranks cannot be started: {error}") from error

    def _launch(self, rank: int, end: socket.socket) -> RankProcess:
        process = self._launch_rank(rank, end)
        self._processes.append(process)
        return process


def behind_of(restored: RestoredVersion, wanted: Version | None) -> Version | None:
    """The version that the replica misses. A version from a source or publisher counts as the newest, unless it is known to be older."""
    if wanted is None or restored.version == wanted:
        return None
    if restored.origin in ("offer", "publisher"):
        return wanted if older(restored.version, wanted) else None
    return wanted


def missed(before: RecoveryStatus | None, served: Version | None) -> Version | None:
    """The version that a replica should serve: the one it served, or, if that was behind already, the one it missed then."""
    if before is None or before.behind is None or before.version != served:
        return served
    return before.behind
