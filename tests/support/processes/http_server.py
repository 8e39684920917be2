"""A server on a port of its own, in a thread, as `liveweight serve` runs it; and its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
import openai
from fastapi import APIRouter
from prometheus_client import CollectorRegistry

from liveweight.errors import LiveWeightError
from liveweight.server.app import build_app
from liveweight.server.engine_port import EnginePort
from liveweight.server.request_guard import AccessRules
from liveweight.server.server import ServerTimes, Shutdown, bind, serve, url_of

E = TypeVar("E", bound=EnginePort)


@dataclass(slots=True)
class Served(Generic[E]):
    """A running server. `fault` is what `serve` returned."""

    url: str
    engine: E
    loop: asyncio.AbstractEventLoop
    shutdown: Shutdown
    thread: threading.Thread
    fault: LiveWeightError | None = None

    def end(self) -> None:
        """As a signal does."""
        self.loop.call_soon_threadsafe(self.shutdown.request)

    def openai(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's client, which shows every error at once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)

    def http(self) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, timeout=30)


@contextmanager
def serving(
    engine: E,
    access: AccessRules | None = None,
    times: ServerTimes | None = None,
    first: Sequence[APIRouter] = (),
) -> Iterator[Served[E]]:
    """Serve the engine until the block ends; then server and engine are stopped."""
    ready, made = threading.Event(), list[Served[E]]()
    bound = bind("127.0.0.1", 0)

    async def main() -> None:
        app = build_app(engine, registry=CollectorRegistry(), access=access or AccessRules(), first=first)
        loop, shutdown = asyncio.get_running_loop(), Shutdown()
        made.append(Served(url_of(bound), engine, loop, shutdown, threading.current_thread()))
        settings = times or ServerTimes(grace_s=0.0)
        made[0].fault = await serve(engine, app, bound, settings, ready=ready.set, shutdown=shutdown)

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server")
    thread.start()
    if not ready.wait(20):
        raise TimeoutError("the server did not start")
    served = made[0]
    try:
        yield served
    finally:
        if thread.is_alive():
            served.end()
        thread.join(30)
        if thread.is_alive():
            raise TimeoutError("the server did not end")
