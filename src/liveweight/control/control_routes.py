"""The control routes: what is served, back to the version before, pause and resume, ending requests. Parse, call, render.

Rounds do not pass through here: publishers drive them over the wire, at the address that `GET /v1/weights` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import Response

from liveweight.control.answers import (
    AbortedAnswer,
    Error,
    PausedAnswer,
    RoundAnswer,
    VersionAnswer,
    WeightsAnswer,
)
from liveweight.control.errors import BadControl
from liveweight.control.fields import Text
from liveweight.control.invalid import refusal
from liveweight.control.port import Engine
from liveweight.control.schema import Strict
from liveweight.control.service import Service, service_of
from liveweight.engine.desk import RoundSummary, Standing
from liveweight.engine.status import PauseMode
from liveweight.spec.manifest import Version

TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 3600.0
MAX_IDS = 10_000
_WITHOUT_UPDATES = Standing(state="serving", serving=None, undo=None, round=None, rounds=())
_Told: TypeAlias = dict[int | str, dict[str, Any]]
_ANY: _Told = {"default": {"model": Error, "description": "Any other error."}}
_INVALID: _Told = {422: {"model": Error, "description": "The request is wrong; `param` says where."}}
_CONFLICT: _Told = {409: {"model": Error, "description": "Not in this state; nothing was changed."}}
_LATE: _Told = {504: {"model": Error, "description": "It was not done in time; what was begun goes on."}}


def _told(*kinds: _Told) -> _Told:
    return {status: row for kind in (*kinds, _ANY) for status, row in kind.items()}


class ControlRoute(APIRoute):
    """A route whose refused bodies are told with 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI makes, with that one difference."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise refusal(error, BadControl) from error

        return handler


Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]


class UndoRequest(Strict):
    """`POST /v1/weights/undo`."""

    timeout_s: Timeout | None = None


class PauseRequest(Strict):
    """`POST /v1/pause`."""

    mode: PauseMode | None = None
    timeout_s: Timeout | None = None


class AbortRequest(Strict):
    """`POST /v1/abort_requests`. Without ids, all requests."""

    request_ids: Annotated[list[Text], Field(max_length=MAX_IDS)] | None = None


router = APIRouter(tags=["control"], route_class=ControlRoute)


@router.get("/v1/weights", response_model=WeightsAnswer, responses=_told(_LATE))
async def weights(request: Request) -> WeightsAnswer:
    """What is served, how the last rounds went, and where publishers reach the engine."""
    return await _weights(service_of(request))


@router.post("/v1/weights/undo", response_model=WeightsAnswer, responses=_told(_CONFLICT, _INVALID, _LATE))
async def undo(request: Request, body: UndoRequest | None = None) -> WeightsAnswer:
    """Go back to the version before."""
    service, timeout_s = service_of(request), _timeout_s(body)
    await service.elsewhere(lambda: service.engine.undo(timeout_s))
    return await _weights(service)


@router.post("/v1/pause", response_model=PausedAnswer, responses=_told(_INVALID, _LATE))
async def pause(request: Request, body: PauseRequest | None = None) -> PausedAnswer:
    """Let requests stand still; new ones wait."""
    service, timeout_s = service_of(request), _timeout_s(body)
    mode: PauseMode = "keep" if body is None or body.mode is None else body.mode
    await service.elsewhere(lambda: service.engine.pause(mode, timeout_s))
    return _paused(service.engine)


@router.post("/v1/resume", response_model=PausedAnswer, responses=_told())
async def resume(request: Request) -> PausedAnswer:
    """Let requests run again."""
    service = service_of(request)
    await service.elsewhere(service.engine.resume)
    return _paused(service.engine)


@router.get("/v1/is_paused", response_model=PausedAnswer, responses=_told())
async def is_paused(request: Request) -> PausedAnswer:
    """Whether requests stand still."""
    return _paused(service_of(request).engine)


@router.post("/v1/abort_requests", response_model=AbortedAnswer, responses=_told(_INVALID))
async def abort_requests(request: Request, body: AbortRequest | None = None) -> AbortedAnswer:
    """End requests with what they have."""
    service = service_of(request)
    ids = None if body is None else body.request_ids
    numbers, unknown = (None, []) if ids is None else service.directory.find(ids)
    aborted = await service.elsewhere(lambda: service.engine.abort_requests(numbers))
    return {"aborted": aborted, "unknown": unknown}


def _timeout_s(body: UndoRequest | PauseRequest | None) -> float:
    return TIMEOUT_S if body is None or body.timeout_s is None else body.timeout_s


def _paused(engine: Engine) -> PausedAnswer:
    state = engine.paused
    return {"is_paused": state == "paused", "state": state}


async def _weights(service: Service) -> WeightsAnswer:
    engine, updates = service.engine, service.engine.config.updates
    standing = _WITHOUT_UPDATES if updates is None else await service.elsewhere(engine.standing)
    return {
        "model": engine.name,
        "tp": engine.config.tp,
        "state": standing.state,
        "paused": engine.paused,
        "version": _version(standing.serving),
        "undo": _version(standing.undo),
        "round": standing.round,
        "rounds": [_round(summary) for summary in standing.rounds],
        "address": engine.address,
        "kv_policy": None if updates is None else updates.kv_policy,
    }


def _version(version: Version | None) -> VersionAnswer | None:
    if version is None:
        return None
    return {"run": version.run, "label": version.label, "digest": version.digest}


def _round(summary: RoundSummary) -> RoundAnswer:
    return {
        "version": summary.version,
        "outcome": summary.outcome,
        "took_s": summary.took_s,
        "stall_s": summary.stall_s,
        "reason": summary.reason,
    }
