"""How a run is told to end: once, from any thread. Every wait of the run looks here.

Not for signal handlers: those must not take locks. Who handles signals hands them to a thread that calls `stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from liveweight.wire.waker import Waker


class RunStopped(Exception):
    """The run was told to end. No error: nothing is wrong."""


class Stop:
    """A word that stays said. `fileno` is readable from then on; callbacks run once, on the thread that says it."""

    def __init__(self) -> None:
        self._said = threading.Event()
        self._waker = Waker()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def stop(self) -> None:
        """End the run."""
        with self._lock:
            if self._said.is_set():
                return
            self._said.set()
            callbacks = list(self._callbacks)
        self._waker.wake()
        for callback in callbacks:
            callback()

    def call(self, callback: Callable[[], None]) -> None:
        """Call this when the run is told to end; at once, if it was. It must be quick and harmless, also after the run."""
        with self._lock:
            said = self._said.is_set()
            self._callbacks.append(callback)
        if said:
            callback()

    @property
    def said(self) -> bool:
        """Whether the run is to end."""
        return self._said.is_set()

    def check(self) -> None:
        """Raise Stopped if the run is to end."""
        if self._said.is_set():
            raise RunStopped

    def wait(self, seconds: float) -> None:
        """Let that much time pass; Stopped if the run is told to end meanwhile."""
        if self._said.wait(seconds):
            raise RunStopped

    def fileno(self) -> int:
        """For a selector."""
        return self._waker.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
