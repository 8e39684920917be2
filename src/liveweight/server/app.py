"""The app: routes, request guard and error handlers around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from liveweight.errors import LiveWeightError
from liveweight.server import health
from liveweight.server.admin import routes as admin_routes
from liveweight.server.admin import sleep_routes, update_routes, verify_routes
from liveweight.server.admin.call_ids import CallIds
from liveweight.server.engine_bridge import DeltaDispatcher
from liveweight.server.engine_port import EnginePort
from liveweight.server.errors import ApiError, error_response, http_response
from liveweight.server.metrics import register
from liveweight.server.openai import routes as openai_routes
from liveweight.server.request_guard import AccessRules, Guard
from liveweight.server.route_context import RouteContext
from liveweight.server.unexpected_errors import Unexpected
from liveweight.server.validation_errors import refusal

WAITERS = 64
"""Control calls that may wait at once."""


def build_app(
    engine: EnginePort, *, registry: CollectorRegistry, access: AccessRules, first: Sequence[APIRouter] = ()
) -> FastAPI:
    """An app that serves the engine. Its lifespan must run; the caller stops the engine. Routes of `first` come before the others."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        dispatcher, waiters = (
            DeltaDispatcher(asyncio.get_running_loop()),
            ThreadPoolExecutor(WAITERS, "liveweight-control"),
        )
        app.state.context = RouteContext(
            engine=engine, dispatcher=dispatcher, registry=registry, waiters=waiters, created=int(time.time())
        )
        try:
            yield
        finally:  # calls that still wait get an error from the engine, which has stopped
            waiters.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="liveweight", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    for router in first:
        app.include_router(router)
    app.include_router(openai_routes.router)
    app.include_router(admin_routes.router)
    app.include_router(sleep_routes.router)
    app.include_router(update_routes.router)
    app.include_router(verify_routes.router)
    app.include_router(health.router)
    app.add_middleware(Guard, access=access)
    app.add_middleware(Unexpected)
    app.add_middleware(CallIds, paths=access.control_paths)  # added last, so it runs first
    app.add_exception_handler(RequestValidationError, _invalid_response)
    app.add_exception_handler(HTTPException, _http_response)
    for kind in (ApiError, LiveWeightError):
        app.add_exception_handler(kind, _response)
    register(engine, registry)
    return app


async def _response(request: Request, error: Exception) -> Response:
    del request
    return error_response(error)


async def _invalid_response(request: Request, error: Exception) -> Response:
    del request
    return error_response(refusal(error) if isinstance(error, RequestValidationError) else error)


async def _http_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(error)
    return http_response(error, f"{request.method} {request.url.path}")
