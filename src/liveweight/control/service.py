"""What the routes share: the engine, the way back from its thread, and the registry of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from liveweight.control.exchange import Post
from liveweight.control.port import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One app's parts; made when its event loop runs."""

    engine: Engine
    post: Post
    registry: CollectorRegistry
    created: int


def service_of(request: Request) -> Service:
    """The parts of the app that the request came to."""
    return cast(Service, request.app.state.service)
