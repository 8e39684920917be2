"""FastDeploy's control interface over our engine, so that scripts written for FastDeploy work: its routes, fields and status numbers.

Owns the translation only. Every route calls the same engine methods as our own routes (server/admin), with the same guarantees: updates
are whole or not at all, nothing resumes on cleared weights, and every wait ends. FastDeploy's settings are in fastdeploy/settings.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response

from liveweight.engine.serving.sleeping import TAGS, Tag
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.errors import LiveWeightError
from liveweight.integrations.fastdeploy.settings import FastDeploySettings
from liveweight.server.admin.call_ids import call_of
from liveweight.server.admin.route import TIMEOUT_S
from liveweight.server.admin.update_routes import rank_answer
from liveweight.server.errors import kind_of
from liveweight.server.request_guard import CONTROL_PATHS
from liveweight.server.route_context import RouteContext, route_context_of
from liveweight.transports.registry import TRANSPORTS

PATHS = CONTROL_PATHS | {"/clear_load_weight", "/update_model_weight", "/v1/weight_status"}
WAKEUP_S = 300.0


class WeightStatus(IntEnum):
    """FastDeploy's numbers for the state of the weights."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class Wrong(Exception):
    """A malformed request; answered with status 400."""


class _Route(APIRoute):
    """A route that answers in FastDeploy's shape: `request_id`, `status`, `error_message`, `result`. Errors keep their HTTP status code."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler, and render errors in that shape."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except Wrong as error:
                return _reply(error=str(error), status=400)
            except LiveWeightError as error:
                return _reply(error=f"{error}; {error.remedy}", status=kind_of(error).status)

        return handler


def router_of(settings: FastDeploySettings) -> APIRouter:
    """FastDeploy's routes. Mount them before our own."""
    router, routes = APIRouter(route_class=_Route), _Routes(settings)
    for method, path, handle in (
        ("POST", "/v1/pause", routes.pause),
        ("POST", "/v1/resume", routes.resume),
        ("GET", "/v1/is_paused", routes.is_paused),
        ("POST", "/v1/sleep", routes.sleep),
        ("POST", "/v1/wakeup", routes.wakeup),
        ("POST", "/v1/update_weights", routes.update_weights),
        ("POST", "/v1/abort_requests", routes.abort_requests),
        ("GET", "/v1/weight_status", routes.weight_status),
        ("GET", "/clear_load_weight", routes.clear),
        ("GET", "/update_model_weight", routes.update_model),
    ):
        router.add_api_route(path, handle, methods=[method], response_model=None, include_in_schema=False)
    return router


class _Routes:
    """Parse, call, render."""

    def __init__(self, settings: FastDeploySettings) -> None:
        self._settings = settings

    async def pause(self, request: Request) -> Response:
        """End running requests with the tokens they have; new requests wait."""
        context = route_context_of(request)
        await context.run_in_thread(lambda: context.engine.pause("abort", TIMEOUT_S))
        return _reply()

    async def resume(self, request: Request) -> Response:
        """Let requests run again."""
        context = route_context_of(request)
        await context.run_in_thread(context.engine.resume)
        return _reply()

    async def is_paused(self, request: Request) -> Response:
        """Whether requests are paused."""
        return _reply({"is_paused": route_context_of(request).engine.paused == "paused"})

    async def sleep(self, request: Request) -> Response:
        """Release memory, by tag."""
        return _reply(await _sleep_or_wake(request, await _tags(request), asleep=True))

    async def wakeup(self, request: Request) -> Response:
        """Allocate the memory again. Once nothing is asleep, requests run, even after a pause."""
        return _reply(await _sleep_or_wake(request, await _tags(request), asleep=False))

    async def clear(self, request: Request) -> Response:
        """FastDeploy's older name for sleep."""
        await _sleep_or_wake(request, frozenset(TAGS), asleep=True)
        return JSONResponse(
            {"msg": "clear_load_weight succeeded", **await _status(route_context_of(request))}
        )

    async def update_model(self, request: Request) -> Response:
        """FastDeploy's older name for wakeup."""
        await _sleep_or_wake(request, frozenset(TAGS), asleep=False)
        return JSONResponse(
            {"msg": "update_model_weight succeeded", **await _status(route_context_of(request))}
        )

    async def weight_status(self, request: Request) -> Response:
        """The state of the weights, with its number."""
        return _reply(await _status(route_context_of(request)))

    async def update_weights(self, request: Request) -> Response:
        """Update the engine to a version of its source. Needs no pause; a pause in effect stays."""
        context, requested = (
            route_context_of(request),
            self._requested_version(call_of(request), await _body(request)),
        )
        release = self._settings.release_cache
        return _reply(await context.run_in_thread(lambda: _update(context, requested, release=release)))

    async def abort_requests(self, request: Request) -> Response:
        """End all requests, or those named, with the tokens they have. An id matches with or without the suffix `_0`."""
        context, body = route_context_of(request), await _body(request)
        ids, everything = body.get("req_ids"), body.get("abort_all") is True
        if not everything and not (
            isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids)
        ):
            raise Wrong("must provide abort_all=true or req_ids")
        open_now = context.open_requests.tokens()
        wanted = list(open_now) if everything else [_known(one, open_now) for one in ids or ()]
        numbers, unknown = context.open_requests.find(wanted)
        await context.run_in_thread(lambda: context.engine.abort_requests(None if everything else numbers))
        ended = [
            {"request_id": one, "output_token_count": open_now[one]} for one in wanted if one in open_now
        ]
        return _reply({"aborted": ended, "not_found": unknown})

    def _requested_version(self, call: str, body: dict[str, Any]) -> RequestedVersion:
        version, verify, mode = (body.get(name) for name in ("version", "verify_checksum", "transfer_mode"))
        if version is not None and not isinstance(version, str):
            raise Wrong("version must be a string")
        if verify is not None and not isinstance(verify, bool):
            raise Wrong("verify_checksum must be a boolean")
        if mode is not None and mode not in TRANSPORTS:
            raise Wrong(f"transfer_mode must be one of {', '.join(sorted(TRANSPORTS))}")
        unknown = sorted(set(body) - {"version", "verify_checksum", "transfer_mode"})
        if unknown:
            raise Wrong(f"unknown fields: {', '.join(unknown)}")
        return RequestedVersion(
            call=call,
            version=version,
            transfer_mode=self._settings.transfer_mode if mode is None else mode,
            verify=verify is not False,
        )


def _update(context: RouteContext, requested: RequestedVersion, *, release: bool) -> list[dict[str, Any]]:
    """Run the update. With `release`, first free the cache's memory, and pause requests until the update is over."""
    engine, clear_s, rebuild_s = context.engine, 0.0, 0.0
    pauses = release and engine.paused == "running"
    if release:
        began_s = time.monotonic()
        if pauses:
            engine.pause("keep", TIMEOUT_S)
        engine.drop_cache(TIMEOUT_S)
        clear_s = time.monotonic() - began_s
    try:
        updated = engine.update_weights(requested)
    finally:
        if pauses:
            began_s = time.monotonic()
            engine.resume()
            rebuild_s = time.monotonic() - began_s
    costs = {"release_cache": release, "cache_clear_cost": clear_s, "cache_rebuild_cost": rebuild_s}
    return [{**one, **costs} for one in _results(updated)]


def _results(updated: UpdateResult) -> list[dict[str, Any]]:
    return [
        {**rank_answer(times, updated.version.label), "update_count": updated.tensors}
        for times in updated.ranks
    ]


async def _sleep_or_wake(request: Request, tags: frozenset[Tag], *, asleep: bool) -> list[dict[str, Any]]:
    context = route_context_of(request)
    engine = context.engine
    if asleep:
        result = await context.run_in_thread(lambda: engine.sleep(tags, TIMEOUT_S))
    else:
        result = await context.run_in_thread(lambda: engine.wake(tags, WAKEUP_S))
        if not result.asleep:
            await context.run_in_thread(engine.resume)
    facts = {"asleep": list(result.asleep), "changed": list(result.changed), "total_cost": result.took_s}
    return [{"rank": rank, **facts} for rank in range(engine.config.tp)]


async def _status(context: RouteContext) -> dict[str, Any]:
    engine = context.engine
    status = WeightStatus.NORMAL
    if "weight" in engine.status().asleep:
        status = WeightStatus.CLEARED
    elif engine.config.updates is not None:
        update_status = await context.run_in_thread(engine.update_status)
        if update_status.state.startswith("asleep"):
            status = WeightStatus.CLEARING
        elif update_status.round is not None:
            status = WeightStatus.UPDATING
    return {"weight_status": int(status), "weight_status_name": status.name}


async def _tags(request: Request) -> frozenset[Tag]:
    """Read `tags` from the body or the query: a list, or names separated by commas. All tags if there is none."""
    given: Any = (await _body(request)).get("tags", request.query_params.get("tags"))
    if given is None:
        return frozenset(TAGS)
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Wrong("Invalid parameter type")
    unknown = sorted(set(names) - set(TAGS))
    if unknown:
        raise Wrong(f"Unsupported tag {unknown}")
    return frozenset(tag for tag in TAGS if tag in names)


async def _body(request: Request) -> dict[str, Any]:
    if not await request.body():
        return {}
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Wrong("the body is no JSON object")
    return body


def _known(id_: str, open_now: dict[str, int]) -> str:
    return next((one for one in (id_, f"{id_}_0", id_.removesuffix("_0")) if one in open_now), id_)


def _reply(result: object = None, *, error: str | None = None, status: int = 200) -> Response:
    body = {
        "request_id": f"control-{uuid.uuid4()}",
        "status": "success" if error is None else "error",
        "error_message": error,
        "result": result,
    }
    return JSONResponse(body, status)
