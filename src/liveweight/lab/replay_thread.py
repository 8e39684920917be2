"""A thread that replays the answers that clients received, one after the other, while they receive more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from liveweight.errors import LiveWeightError
from liveweight.spec.deadline import Deadline

LEAVE_S = 10.0

T = TypeVar("T")


class ReplayThread(Generic[T]):
    """Passes every item to `judge`. `put` is for any thread, and waits while `backlog` items wait (0: never). Ends with the `with`."""

    def __init__(self, judge: Callable[[T], None], *, backlog: int = 0) -> None:
        self._judge = judge
        self._items: queue.Queue[T | None] = queue.Queue(backlog)
        self._fault: Exception | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def put(self, item: T) -> None:
        """Queue a complete item."""
        self._items.put(item)

    def finish(self, deadline: Deadline) -> None:
        """Wait until every item is judged."""
        with suppress(queue.Full):  # a full queue: the thread is still alive, which raises below
            self._items.put(None, timeout=deadline.remaining_s())
        self._thread.join(deadline.remaining_s())
        if self._fault is not None:
            raise LiveWeightError(f"replaying failed: {self._fault}") from self._fault
        if self._thread.is_alive():
            raise deadline.exceeded("every answer to be replayed")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, do not wait for queued items: the thread is a daemon, and busy with at most one answer."""
        self._left = True
        with suppress(queue.Full):
            self._items.put(None, timeout=LEAVE_S)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._fault is None and not self._left:
                try:
                    self._judge(item)
                # `finish` raises it; later items are discarded, so that nobody waits in `put`.
                except Exception as error:
                    self._fault = error
