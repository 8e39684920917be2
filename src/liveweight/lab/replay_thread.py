"""A thread that judges what clients were sent, one answer after the other, while they are sent more."""

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
    """Hands what is put to `judge`. `put` is for any thread, and waits while `backlog` are behind (0: never); it ends with the `with`."""

    def __init__(self, judge: Callable[[T], None], *, backlog: int = 0) -> None:
        self._judge = judge
        self._items: queue.Queue[T | None] = queue.Queue(backlog)
        self._fault: Exception | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def put(self, item: T) -> None:
        """One that nothing is added to any more."""
        self._items.put(item)

    def finish(self, deadline: Deadline) -> None:
        """Everything that was put is judged on return."""
        with suppress(queue.Full):  # then it is alive below
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
        """Whoever leaves by an error does not wait for what is behind; the thread is daemonic, and at most in one answer."""
        self._left = True
        with suppress(queue.Full):
            self._items.put(None, timeout=LEAVE_S)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._fault is None and not self._left:
                try:
                    self._judge(item)
                except (
                    Exception
                ) as error:  # told by `finish`; what comes after it is let go, so that nobody waits to put it
                    self._fault = error
