"""What the routes share: the engine, the way back from its thread, open requests, threads to wait in, and the registry of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from liveweight.server.engine_bridge import Post
from liveweight.server.engine_port import EnginePort
from liveweight.server.open_requests import OpenRequests

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """One app's parts; made when its event loop runs."""

    engine: EnginePort
    post: Post
    registry: CollectorRegistry
    waiters: Executor
    created: int
    directory: OpenRequests = field(default_factory=OpenRequests)

    async def elsewhere(self, call: Callable[[], T]) -> T:
        """What the call returns that may wait: outside the event loop, and not in the threads that others need."""
        return await asyncio.get_running_loop().run_in_executor(self.waiters, call)


def service_of(request: Request) -> RouteContext:
    """The parts of the app that the request came to."""
    return cast(RouteContext, request.app.state.service)
