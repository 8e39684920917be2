"""The moments that the current round has reached, as reported by the engine's leader or by the trainer."""

from __future__ import annotations

import threading

from liveweight.lab.torture.fault_plan import MOMENTS
from liveweight.lab.torture.targets.target import StrikeCounts
from liveweight.observe.events import AnyEvent, Recovered, RoundCommitted, RoundEnded, RoundEvent, RoundOpened
from liveweight.wire.waker import Waker


class RoundMoments:
    """Records the moments since a round was begun. `on_event` is called by the bus, on any thread; the rest by the torture's thread."""

    def __init__(self, counts: StrikeCounts) -> None:
        self.waker = Waker()
        self.last = "publish"
        self._seen = {"publish"}
        self._counts, self._lock = counts, threading.Lock()

    def begin(self) -> None:
        """Forget the round before."""
        with self._lock:
            self.last, self._seen = "publish", {"publish"}
            self.waker.take()

    def seen(self, name: str) -> bool:
        """Whether this moment was reached."""
        with self._lock:
            self.waker.take()
            return name in self._seen

    def reached(self, name: str) -> None:
        """A trainer reports a moment of its own round; used if the engine's leader runs in another process."""
        with self._lock:
            self.last = name
            self._seen.add(name)
            self._counts.rounds += name == "RoundOpened"
            self._counts.committed += name == "RoundCommitted"

    def on_event(self, event: AnyEvent) -> None:
        """Read the events of the engine's bus."""
        name = type(event).__name__
        with self._lock:
            if isinstance(event, RoundEvent):
                self.last = name
                self._seen.add(name)
            self._counts.rounds += isinstance(event, RoundOpened)
            self._counts.restarts += isinstance(event, Recovered)
            self._counts.committed += isinstance(event, RoundCommitted) and event.rank is None
            if isinstance(event, RoundEnded):
                self._seen |= set(MOMENTS)  # the round is over: no further moment will come
        self.waker.wake()

    def close(self) -> None:
        """Close the waker."""
        self.waker.close()
