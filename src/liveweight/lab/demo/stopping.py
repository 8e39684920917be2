"""Stops a run: once, from any thread. Every wait of the run checks here.

Not for signal handlers, which must not take locks: cli/signals hands signals to a thread that calls `stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from liveweight.wire.waker import Waker


class RunStopped(Exception):
    """The run was stopped. Not an error: nothing is wrong."""


class Stop:
    """A stop request, which stays set. `fileno` is then readable; callbacks run once, on the thread that calls `stop`."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._waker = Waker()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def stop(self) -> None:
        """Stop the run."""
        with self._lock:
            if self._requested.is_set():
                return
            self._requested.set()
            callbacks = list(self._callbacks)
        self._waker.wake()
        for callback in callbacks:
            callback()

    def call(self, callback: Callable[[], None]) -> None:
        """Call this when the run is stopped; at once, if it was. The callback must be quick, and harmless after the run."""
        with self._lock:
            requested = self._requested.is_set()
            self._callbacks.append(callback)
        if requested:
            callback()

    @property
    def requested(self) -> bool:
        """Whether `stop` was called."""
        return self._requested.is_set()

    def check(self) -> None:
        """Raise RunStopped if the run was stopped."""
        if self._requested.is_set():
            raise RunStopped

    def wait(self, seconds: float) -> None:
        """Wait that long. RunStopped if the run is stopped meanwhile."""
        if self._requested.wait(seconds):
            raise RunStopped

    def fileno(self) -> int:
        """For a selector."""
        return self._waker.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
