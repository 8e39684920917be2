"""The shadow lock: keeps the staging thread and the main thread of a rank from using the shadow at the same time.

The shadow has one owner at a time. Live weights may be read by any thread, and change only at a swap; `swaps` tells a reader
whether there was one meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from liveweight.errors import WrongState
from liveweight.spec.deadline import Deadline
from liveweight.wire.messages.values import RoundId

OUTCOME_S = 2.0
"""How long staging waits for the outcome of a commit that the leader has decided already."""


class ShadowLock:
    """Who owns the shadow: the staging thread while it stages, the main thread while it swaps.

    Remembers which round lies staged in it, and whether the outcome of a swap is unknown: then the shadow is the way back,
    and nothing may be staged into it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.staged: RoundId | None = None
        self.unchanged = False
        """Whether the round of `staged` brings what is live already: then nothing lies in the shadow, and nothing is to be swapped."""
        self.swaps = 0
        """Raised before every swap, also one that goes back: live weights are what they were while it stays the same."""
        self._certain = threading.Event()
        self._certain.set()

    @property
    def doubt(self) -> bool:
        """Whether a swap has begun and its outcome is not known."""
        return not self._certain.is_set()

    @doubt.setter
    def doubt(self, doubt: bool) -> None:
        if doubt:
            self._certain.clear()
        else:
            self._certain.set()

    def certain(self, within_s: float) -> bool:
        """Wait until there is no doubt; whether there is none."""
        return self._certain.wait(within_s)

    @contextmanager
    def held(self, deadline: Deadline) -> Iterator[None]:
        """Own the shadow. Raises DeadlineExceeded if the other thread does not release it in time."""
        if not self.lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.exceeded("the shadow, which the other thread holds")
        try:
            yield
        finally:
            self.lock.release()

    @contextmanager
    def for_staging(self, deadline: Deadline) -> Iterator[None]:
        """Own the shadow to fill it anew; refused while it is the way back of a swap in doubt.

        A publisher may open its next round as soon as the leader has told it of the last commit: the outcome is then on its way here.
        """
        self.certain(deadline.within(OUTCOME_S).remaining_s())
        with self.held(deadline):
            if self.doubt:
                raise WrongState("in doubt about the last commit", "stage")
            self.staged, self.unchanged = None, False
            yield
