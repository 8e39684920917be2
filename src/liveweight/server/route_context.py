"""The route context: what all routes share. Engine, delta dispatcher, open requests, threads for blocking calls, metrics registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from liveweight.server.engine_bridge import DeltaDispatcher
from liveweight.server.engine_port import EnginePort
from liveweight.server.open_requests import OpenRequests

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """Shared by the routes of one app; created when its event loop runs."""

    engine: EnginePort
    dispatcher: DeltaDispatcher
    registry: CollectorRegistry
    waiters: Executor
    created: int
    open_requests: OpenRequests = field(default_factory=OpenRequests)

    async def run_in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call outside the event loop, in threads of its own; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self.waiters, call)


def route_context_of(request: Request) -> RouteContext:
    """The context of the app that serves the request."""
    return cast(RouteContext, request.app.state.context)
