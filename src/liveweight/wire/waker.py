"""Wakers: how another thread of the same process ends a wait early.

Owns one event descriptor. What the woken thread does then is up to it.
"""

from __future__ import annotations

import os
from threading import Lock


class Waker:
    """A flag that a wait can poll. `wake` may be called by any thread at any time, also after the owner closed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._woken = False

    def wake(self) -> None:
        """End the owner's present wait, or its next one. Waking twice before the owner calls `take` wakes it once."""
        with self._lock:
            self._woken = True
            if not self._closed:
                os.eventfd_write(self._descriptor, 1)

    @property
    def woken(self) -> bool:
        """Whether `wake` was ever called. For wakers that are never taken, such as a cancellation."""
        return self._woken

    def fileno(self) -> int:
        """The descriptor to poll; for the owner."""
        return self._descriptor

    def take(self) -> bool:
        """Whether it was woken since the last call; for the owner."""
        try:
            return os.eventfd_read(self._descriptor) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Release the descriptor; for the owner. Later calls of `wake` do nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._descriptor)
