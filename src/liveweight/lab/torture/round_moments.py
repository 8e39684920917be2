"""The moments of a round, as the engine's own leader says them, or the trainer that drives it."""

from __future__ import annotations

import threading

from liveweight.lab.torture.fault_plan import MOMENTS
from liveweight.lab.torture.targets.target import StrikeCounts
from liveweight.observe.events import AnyEvent, Recovered, RoundCommitted, RoundEnded, RoundEvent, RoundOpened
from liveweight.wire.waker import Waker


class RoundMoments:
    """Remembers what was said since a round was begun. `on_event` is the bus's, on any thread; the rest is the torture's."""

    def __init__(self, counts: StrikeCounts) -> None:
        self.waker = Waker()
        self.last = "publish"
        self._seen = {"publish"}
        self._counts, self._lock = counts, threading.Lock()

    def begin(self) -> None:
        """Forget what was."""
        with self._lock:
            self.last, self._seen = "publish", {"publish"}
            self.waker.take()

    def seen(self, name: str) -> bool:
        """Whether it was said."""
        with self._lock:
            self.waker.take()
            return name in self._seen

    def reached(self, name: str) -> None:
        """A moment as a trainer says it of its own round, where the engine's leader is out of hearing."""
        with self._lock:
            self.last = name
            self._seen.add(name)
            self._counts.rounds += name == "RoundOpened"
            self._counts.committed += name == "RoundCommitted"

    def on_event(self, event: AnyEvent) -> None:
        """The bus's reader."""
        name = type(event).__name__
        with self._lock:
            if isinstance(event, RoundEvent):
                self.last = name
                self._seen.add(name)
            self._counts.rounds += isinstance(event, RoundOpened)
            self._counts.restarts += isinstance(event, Recovered)
            self._counts.committed += isinstance(event, RoundCommitted) and event.rank is None
            if isinstance(event, RoundEnded):
                self._seen |= set(MOMENTS)  # none of them comes any more
        self.waker.wake()

    def close(self) -> None:
        """For the owner."""
        self.waker.close()
