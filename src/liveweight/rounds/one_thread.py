"""One thread at a time: an object whose methods must not overlap refuses a second thread, naming the method that runs.

Which methods these are is the object's; a method that must interrupt the others (`close`) is not among them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from liveweight.errors import WrongState

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ExclusiveCalls:
    """The calls of one object. The thread that is in one may call others from there; threads may take turns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: str | None = None

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """Run the block as that method. Raises WrongState, without waiting, while another thread is in a method."""
        if not self._lock.acquire(blocking=False):
            raise WrongState(f"{self._running or 'another method'}; one thread at a time may call it", method)
        outer = self._running
        try:
            if outer is None:
                self._running = f"{method} runs in thread {threading.current_thread().name}"
            yield
        finally:
            self._running = outer
            self._lock.release()


class _Exclusive(Protocol):
    _calls: ExclusiveCalls


_Self = TypeVar("_Self", bound=_Exclusive)


def exclusive(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """A method of an object with `_calls` that never runs while another thread is in one of them."""

    @functools.wraps(method)
    def guarded(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self._calls.running(method.__name__):
            return method(self, *args, **kwargs)

    return guarded
