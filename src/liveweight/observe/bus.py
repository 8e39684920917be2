"""The bus: carries events from emitters to readers, inside one process.

Owns the list of readers and their isolation. A program makes one bus and hands it down; there is no global one. Emitting on a bus without
readers only loops over an empty tuple.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from liveweight.errors import DeadlineExceeded
from liveweight.observe.events import AnyEvent, Event

Reader: TypeAlias = Callable[[AnyEvent], None]
"""Called on the emitter's thread, from several threads at once: quick, thread-safe, and never waiting."""

E = TypeVar("E", bound=Event)

_LOGGER = logging.getLogger("liveweight")


class Subscription:
    """One reader's subscription to a bus. Leaving the `with`, or `close()`, ends it."""

    def __init__(self, reader: Reader, unsubscribe: Callable[[Subscription], None]) -> None:
        self._reader, self._unsubscribe = reader, unsubscribe
        self._lock = threading.Lock()
        self._failure_logged = False

    def deliver(self, event: AnyEvent) -> None:
        """Hand the event to the reader. The bus calls it; what the reader raises ends here."""
        try:
            self._reader(event)
        except Exception:
            self._log_failure(event)

    def close(self) -> None:
        """Deliver no more events, but for one that another thread is emitting right now. May be called twice."""
        self._unsubscribe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log_failure(self, event: AnyEvent) -> None:
        with self._lock:
            first, self._failure_logged = not self._failure_logged, True
        if first:
            name = type(event).__name__
            _LOGGER.exception(
                "reader %r failed on %s; its further failures are not logged", self._reader, name
            )


class Bus:
    """Hands every event to every reader, in the order of subscription, on the thread that emits it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()  # replaced, never changed: emit() needs no lock

    def emit(self, event: AnyEvent) -> None:
        """Hand the event to all readers, and return when all are done. Never raises what a reader raised."""
        for subscription in self._subscriptions:
            subscription.deliver(event)

    def subscribe(self, reader: Reader) -> Subscription:
        """Hand all events to the reader from now on, until the subscription is closed."""
        subscription = Subscription(reader, self._unsubscribe)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def _unsubscribe(self, ended: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not ended)


class Recorder:
    """A reader that keeps all events, and lets other threads wait for one. Grows without limit."""

    def __init__(self) -> None:
        self._events: list[AnyEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: AnyEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def events(self) -> tuple[AnyEvent, ...]:
        """All events so far, in the order in which they were emitted."""
        with self._changed:
            return tuple(self._events)

    def of(self, kind: type[E]) -> tuple[E, ...]:
        """The events of one kind so far."""
        return tuple(event for event in self.events if isinstance(event, kind))

    def wait_for(
        self, predicate: Callable[[AnyEvent], bool], within_s: float, *, waiting_for: str = "an event"
    ) -> AnyEvent:
        """The first event, past or to come, that the predicate accepts; DeadlineExceeded if none came.

        The predicate sees each event once, under the recorder's lock: it must not emit.
        """
        began_s = time.monotonic()
        seen = 0
        with self._changed:
            while True:
                for event in self._events[seen:]:
                    if predicate(event):
                        return event
                seen = len(self._events)
                left_s = began_s + within_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(waiting_for, time.monotonic() - began_s)
                self._changed.wait(left_s)
