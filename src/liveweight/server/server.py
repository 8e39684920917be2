"""The server: an app behind a socket, from start to shutdown.

Owns the order of shutdown. On request: the engine takes no more requests, running ones finish within the grace, then the sockets close.
After a lost rank: every open request fails at once, `/health` shows the fault for a moment longer, then the same shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from liveweight.errors import EngineConfigInvalid, LiveWeightError
from liveweight.server.engine_port import EnginePort

FLUSH_S = 5.0
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is reused while it closes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """Times of a shutdown: for running requests (`grace_s`), and how long `/health` shows a lost rank (`tell_fault_s`)."""

    grace_s: float = 30.0
    tell_fault_s: float = 1.0
    access_log: bool = False


class Shutdown:
    """A program's request to shut down: `soon` lets running requests finish, `now` does not. For the event loop's thread."""

    def __init__(self) -> None:
        self.soon, self.now = asyncio.Event(), asyncio.Event()

    def request(self) -> None:
        """The first call sets `soon`, the second `now`."""
        (self.now if self.soon.is_set() else self.soon).set()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and does not listen yet; port 0 takes a free one. EngineConfigInvalid if it is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EngineConfigInvalid(f"cannot serve on {host}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise EngineConfigInvalid(f"cannot serve on {host} port {port}: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of the socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server; leaves signals to the program and calls `ready` when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `ready`."""
        await super().startup(sockets)
        self._ready()

    async def cut_off(self) -> None:
        """End connections whose clients do not read what is left for them."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the program handles its signals."""
        yield


async def serve(
    engine: EnginePort,
    app: ASGIApp,
    bound: socket.socket,
    serving: ServerTimes,
    *,
    ready: Callable[[], None],
    shutdown: Shutdown,
) -> LiveWeightError | None:
    """Serve until shutdown, or until a rank is lost: returns that error. On return the engine is stopped and every socket closed."""
    loop, fault = asyncio.get_running_loop(), asyncio.Queue[LiveWeightError]()
    engine.on_failure(lambda error: _report_fault(loop, fault, error))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=serving.access_log,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
        timeout_graceful_shutdown=int(FLUSH_S),
    )
    server = _Server(config, ready)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    failed = asyncio.create_task(fault.get())
    try:
        await _first(running, failed, shutdown.soon.wait())
        if failed.done():
            await _first(asyncio.sleep(serving.tell_fault_s), shutdown.soon.wait())
        await _stop(engine, 0.0 if failed.done() else serving.grace_s, shutdown)
    finally:
        server.should_exit = True
        failed.cancel()
        await running
        await server.cut_off()
    return None if failed.cancelled() or not failed.done() else failed.result()


async def _stop(engine: EnginePort, grace_s: float, shutdown: Shutdown) -> None:
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop, grace_s))
    await _first(stopping, shutdown.now.wait())
    if not stopping.done():
        await asyncio.to_thread(engine.stop, 0.0)
    await stopping


async def _first(*waits: asyncio.Task[Any] | Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them. Tasks go on; coroutines end here."""
    tasks = [wait if isinstance(wait, asyncio.Task) else asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


def _report_fault(
    loop: asyncio.AbstractEventLoop, fault: asyncio.Queue[LiveWeightError], error: LiveWeightError
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
        loop.call_soon_threadsafe(fault.put_nowait, error)
