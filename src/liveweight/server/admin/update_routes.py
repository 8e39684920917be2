"""`POST /v1/update_weights`: an operator asks for a version of the engine's source. Parse, call, render.

The engine runs the round outside the event loop (engine/updates/requested_update); other routes answer meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal, TypeAlias, cast

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from liveweight.engine.models.model_spec import DRAFT
from liveweight.engine.status import PauseMode
from liveweight.engine.updates.requested_update import RequestedVersion, UpdateResult
from liveweight.server.admin.call_ids import call_of
from liveweight.server.admin.route import (
    CONFLICT,
    INVALID,
    LATE,
    TIMEOUT_S,
    ControlRoute,
    ErrorResponses,
    Timeout,
    error_responses,
    version_answer,
)
from liveweight.server.field_types import Text, wrong
from liveweight.server.openai.request_types import Strict
from liveweight.server.response_types import Error, VersionAnswer
from liveweight.server.route_context import route_context_of
from liveweight.transports.registry import TRANSPORTS
from liveweight.wire.messages.values import KvPolicy, RankTimes

MODES = sorted(TRANSPORTS)
MAX_LABEL = 1000
SOURCE_FAILED: ErrorResponses = {
    502: {"model": Error, "description": "What the source gave is not what it said; nothing was changed."},
    503: {"model": Error, "description": "The source or a rank is gone; nothing was changed."},
}


def _known_mode(value: str) -> str:
    if value not in TRANSPORTS:
        raise wrong(f"must be one of {', '.join(MODES)}")
    return value


TransferMode = Annotated[str, AfterValidator(_known_mode), WithJsonSchema({"type": "string", "enum": MODES})]
Label: TypeAlias = (
    Annotated[Text, Field(min_length=1, max_length=MAX_LABEL)] | Annotated[int, Field(ge=-(2**63), lt=2**63)]
)


class UpdateRequest(Strict):
    """`POST /v1/update_weights`. Without a version, the source's newest."""

    version: Label | None = None
    transfer_mode: TransferMode | None = None
    verify_checksum: bool | None = None
    kv_policy: KvPolicy | None = None
    pause: PauseMode | None = None
    timeout_s: Timeout | None = None


class RankAnswer(TypedDict):
    """One rank's part, in seconds that it measured itself. `sync_cost` is `stage_s`, `update_cost` is `swap_s`, `total_cost` all three."""

    rank: int
    version: str | int
    sync_cost: float
    update_cost: float
    total_cost: float
    stage_s: float
    verify_s: float
    swap_s: float
    staged_bytes: int


class StepsAnswer(TypedDict):
    """The replica's steps, in seconds; of those that every rank takes, the slowest."""

    hold_s: float
    stage_s: float
    verify_s: float
    pause_s: float
    vote_s: float
    commit_s: float
    stall_s: float
    total_s: float


class UpdateAnswer(TypedDict):
    """`/v1/update_weights`: the version serves. `round` null: it did before, and nothing was done; `draft` as in a round's row."""

    call_id: str
    version: VersionAnswer
    outcome: Literal["committed", "unchanged"]
    round: str | None
    transfer_mode: str
    verified: bool
    tensors: int
    draft: Literal["kept"] | None
    steps: StepsAnswer
    results: list[RankAnswer]


router = APIRouter(tags=["control"], route_class=ControlRoute)


@router.post(
    "/v1/update_weights",
    response_model=UpdateAnswer,
    responses=error_responses(CONFLICT, INVALID, SOURCE_FAILED, LATE),
)
async def update_weights(request: Request, body: UpdateRequest | None = None) -> UpdateAnswer:
    """Take the engine to a version that its source offers."""
    context, requested = (
        route_context_of(request),
        _requested_version(call_of(request), body or UpdateRequest()),
    )
    updated = await context.run_in_thread(lambda: context.engine.update_weights(requested))
    return _answer(requested.call, updated)


def _requested_version(call: str, body: UpdateRequest) -> RequestedVersion:
    return RequestedVersion(
        call=call,
        version=body.version,
        transfer_mode=body.transfer_mode,
        verify=body.verify_checksum is not False,
        kv_policy=body.kv_policy,
        pause=body.pause,
        timeout_s=TIMEOUT_S if body.timeout_s is None else body.timeout_s,
    )


def _answer(call: str, updated: UpdateResult) -> UpdateAnswer:
    return {
        "call_id": call,
        "version": version_answer(updated.version),
        "outcome": updated.outcome,
        "round": updated.round,
        "transfer_mode": updated.mode,
        "verified": updated.verified,
        "tensors": updated.tensors,
        "draft": "kept" if DRAFT in updated.kept else None,
        "steps": cast(StepsAnswer, asdict(updated.steps)),
        "results": [rank_answer(times, updated.version.label) for times in updated.ranks],
    }


def rank_answer(times: RankTimes, label: str | int) -> RankAnswer:
    """What one rank did, as answers have it."""
    return {
        "rank": times.rank,
        "version": label,
        "sync_cost": times.stage_s,
        "update_cost": times.swap_s,
        "total_cost": times.stage_s + times.verify_s + times.swap_s,
        "stage_s": times.stage_s,
        "verify_s": times.verify_s,
        "swap_s": times.swap_s,
        "staged_bytes": times.staged_bytes,
    }
