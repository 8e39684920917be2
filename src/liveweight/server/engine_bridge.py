"""The bridge between the event loop and the engine's thread: submits requests, delivers pieces of answers, cancels what is left.

Owns the hand-over between the threads. No lock is held during a call; the engine's thread never waits for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from liveweight.engine.serving.requests import Delta, Sink
from liveweight.errors import QueueFull
from liveweight.server.engine_port import EnginePort
from liveweight.server.openai.generation_requests import EngineRequest


class DeltaDispatcher:
    """Dispatches deltas to one event loop, and wakes it once for all that came since its last turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[Callable[[Delta], None], Delta]] = []

    def sink(self, take: Callable[[Delta], None]) -> Sink:
        """A sink for any thread; `take` is called on the loop."""

        def put(delta: Delta) -> None:
            with self._lock:
                self._pending.append((take, delta))
                first = len(self._pending) == 1
            if first:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(self._deliver)

        return put

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for take, delta in pending:
            take(delta)


class EngineBridge:
    """The engine's requests behind one HTTP request. Leaving the `with` cancels those that have not ended."""

    def __init__(
        self, engine: EnginePort, dispatcher: DeltaDispatcher, requests: Sequence[EngineRequest]
    ) -> None:
        self._engine, self._dispatcher, self._requests = engine, dispatcher, requests
        self._open: dict[int, int] = {}
        self._arrived: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self.tokens = 0
        """Tokens that have come so far, of all answers together."""

    def __enter__(self) -> Self:
        self._check_room()
        try:
            for index, request in enumerate(self._requests):
                sink = self._dispatcher.sink(partial(self._on_delta, index))
                self._open[index] = self._engine.submit(
                    request.prompt, request.sampling, sink, request.demand
                )
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _check_room(self) -> None:
        """QueueFull before the first of many is taken. Others may be quicker; then the engine refuses one, and all are cancelled."""
        count = len(self._requests)
        if count == 1:
            return
        status, config = self._engine.status(), self._engine.config
        room = config.max_running + config.max_waiting - status.running - status.waiting
        if count > room:
            raise QueueFull(
                f"{status.running} requests run and {status.waiting} wait already, which leaves room for {max(0, room)} of these {count}"
            )

    @property
    def requests(self) -> tuple[int, ...]:
        """The numbers of those that have not ended."""
        return tuple(self._open.values())

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """The pieces of all answers, each with its request's index: all that came since the last time, until all have ended.

        Raises an answer's fault, after the pieces before it.
        """
        while self._open:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
            for index, delta in arrived:
                if delta.last:
                    del self._open[index]
            fault = next((delta.fault for _, delta in arrived if delta.fault is not None), None)
            yield [(index, delta) for index, delta in arrived if delta.fault is None]
            if fault is not None:
                raise fault.with_traceback(None)  # one error object, raised in many requests

    def _on_delta(self, index: int, delta: Delta) -> None:
        self.tokens += len(delta.tokens)
        self._arrived.put_nowait((index, delta))

    def _cancel(self) -> None:
        while self._open:
            _, request = self._open.popitem()
            self._engine.cancel(request)
