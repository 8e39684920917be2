"""The control routes: served version, undo, pause and resume, abort of requests. Parse, call, render.

Rounds do not pass through here: publishers connect to the leader, at the address that `GET /v1/weights` returns.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from liveweight.engine.models.model_spec import DRAFT
from liveweight.engine.status import PauseMode, RecoveryStatus, SavingStatus
from liveweight.engine.updates.leader_client import RoundSummary, UpdateStatus
from liveweight.server.admin.route import (
    CONFLICT,
    INVALID,
    LATE,
    TIMEOUT_S,
    ControlRoute,
    Timeout,
    error_responses,
    version_answer,
)
from liveweight.server.engine_port import EnginePort
from liveweight.server.field_types import Text
from liveweight.server.openai.request_types import Strict
from liveweight.server.response_types import (
    AbortedAnswer,
    PausedAnswer,
    RecoveryAnswer,
    RoundAnswer,
    SnapshotsAnswer,
    VersionAnswer,
    WeightsAnswer,
)
from liveweight.server.route_context import RouteContext, route_context_of
from liveweight.spec.manifest import Version

MAX_IDS = 10_000


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


@router.get("/v1/weights", response_model=WeightsAnswer, responses=error_responses(LATE))
async def weights(request: Request) -> WeightsAnswer:
    """What is served, how the last rounds went, and where publishers reach the engine."""
    return await _weights(route_context_of(request))


@router.post(
    "/v1/weights/undo", response_model=WeightsAnswer, responses=error_responses(CONFLICT, INVALID, LATE)
)
async def undo(request: Request, body: UndoRequest | None = None) -> WeightsAnswer:
    """Go back to the version before."""
    context, timeout_s = route_context_of(request), _timeout_s(body)
    await context.run_in_thread(lambda: context.engine.undo(timeout_s))
    return await _weights(context)


@router.post("/v1/pause", response_model=PausedAnswer, responses=error_responses(INVALID, LATE))
async def pause(request: Request, body: PauseRequest | None = None) -> PausedAnswer:
    """Pause requests; new ones wait."""
    context, timeout_s = route_context_of(request), _timeout_s(body)
    mode: PauseMode = "keep" if body is None or body.mode is None else body.mode
    await context.run_in_thread(lambda: context.engine.pause(mode, timeout_s))
    return _paused(context.engine)


@router.post("/v1/resume", response_model=PausedAnswer, responses=error_responses())
async def resume(request: Request) -> PausedAnswer:
    """Let requests run again."""
    context = route_context_of(request)
    await context.run_in_thread(context.engine.resume)
    return _paused(context.engine)


@router.get("/v1/is_paused", response_model=PausedAnswer, responses=error_responses())
async def is_paused(request: Request) -> PausedAnswer:
    """Whether requests are paused."""
    return _paused(route_context_of(request).engine)


@router.post("/v1/abort_requests", response_model=AbortedAnswer, responses=error_responses(INVALID))
async def abort_requests(request: Request, body: AbortRequest | None = None) -> AbortedAnswer:
    """End requests with what they have."""
    context = route_context_of(request)
    ids = None if body is None else body.request_ids
    numbers, unknown = (None, []) if ids is None else context.open_requests.find(ids)
    aborted = await context.run_in_thread(lambda: context.engine.abort_requests(numbers))
    return {"aborted": aborted, "unknown": unknown}


def _timeout_s(body: UndoRequest | PauseRequest | None) -> float:
    return TIMEOUT_S if body is None or body.timeout_s is None else body.timeout_s


def _paused(engine: EnginePort) -> PausedAnswer:
    state = engine.paused
    return {"is_paused": state == "paused", "state": state}


async def _weights(context: RouteContext) -> WeightsAnswer:
    engine, updates = context.engine, context.engine.config.updates
    update_status = (
        _started(engine.start) if updates is None else await context.run_in_thread(engine.update_status)
    )
    return {
        "model": engine.name,
        "tp": engine.config.tp,
        "state": update_status.state,
        "paused": engine.paused,
        "version": _version(update_status.serving),
        "undo": _version(update_status.undo),
        "round": update_status.round,
        "rounds": [_round(summary) for summary in update_status.rounds],
        "address": engine.address,
        "source": None if updates is None else updates.source,
        "transfer_mode": None if updates is None else updates.transfer_mode,
        "kv_policy": None if updates is None else updates.kv_policy,
        "draft": _draft(engine, update_status),
        "draft_weights": None if updates is None else updates.draft_weights,
        "snapshots": None if update_status.snapshots is None else _snapshots(update_status.snapshots),
        "recovery": None if update_status.recovery is None else _recovery(update_status.recovery),
        "serving_s": update_status.serving_s,
        "pending": update_status.pending,
        "asleep": list(engine.status().asleep),
    }


def _snapshots(status: SavingStatus) -> SnapshotsAnswer:
    return {
        "directory": status.directory,
        "every": status.every,
        "keep": status.keep,
        "newest": _version(status.newest),
        "path": status.path,
        "writing": _version(status.writing),
        "failed": status.failed,
    }


def _recovery(status: RecoveryStatus) -> RecoveryAnswer:
    return {
        "restarts": status.restarts,
        "version": version_answer(status.version),
        "origin": status.origin,
        "behind": _version(status.behind),
        "notes": list(status.notes),
        "took_s": status.took_s,
    }


def _started(version: Version) -> UpdateStatus:
    """The status of an engine without live updates: it has no leader, and serves the version it was started on."""
    return UpdateStatus(state=f"serving {version}", serving=version, undo=None, round=None, rounds=())


def _draft(engine: EnginePort, update_status: UpdateStatus) -> Literal["current", "kept"] | None:
    """Whether the draft's weights are of the version that serves. None: nothing drafts, or nothing serves at this moment."""
    drafts = engine.config.draft and engine.spec.draft_layers > 0
    if not drafts or update_status.serving is None:
        return None
    return "kept" if DRAFT in update_status.kept else "current"


def _version(version: Version | None) -> VersionAnswer | None:
    return None if version is None else version_answer(version)


def _round(summary: RoundSummary) -> RoundAnswer:
    return {
        "version": summary.version,
        "outcome": summary.outcome,
        "took_s": summary.took_s,
        "stall_s": summary.stall_s,
        "reason": summary.reason,
        "draft": "kept" if DRAFT in summary.kept else None,
    }
