"""`POST /v1/sleep` and `POST /v1/wakeup`: an engine releases memory, and restores it. Parse, call, render."""

from __future__ import annotations

from fastapi import APIRouter, Request
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from liveweight.engine.serving.sleeping import TAGS, SleepResult, Tag
from liveweight.server.admin.route import (
    CONFLICT,
    INVALID,
    LATE,
    TIMEOUT_S,
    ControlRoute,
    Timeout,
    error_responses,
)
from liveweight.server.openai.request_types import Strict
from liveweight.server.route_context import route_context_of


class SleepRequest(Strict):
    """Both routes. Without tags, all of them."""

    tags: list[Tag] | None = None
    timeout_s: Timeout | None = None


class SleepAnswer(TypedDict):
    """What is asleep now, what the call changed, the bytes that all ranks released or read, and how long it took."""

    asleep: list[Tag]
    changed: list[Tag]
    size_bytes: int
    took_s: float


router = APIRouter(tags=["control"], route_class=ControlRoute)


@router.post("/v1/sleep", response_model=SleepAnswer, responses=error_responses(CONFLICT, INVALID, LATE))
async def sleep(request: Request, body: SleepRequest | None = None) -> SleepAnswer:
    """Release the memory of weights, of the cache or of both; requests pause until it is restored."""
    context, (tags, timeout_s) = route_context_of(request), _arguments(body)
    return _answer(await context.run_in_thread(lambda: context.engine.sleep(tags, timeout_s)))


@router.post("/v1/wakeup", response_model=SleepAnswer, responses=error_responses(CONFLICT, INVALID, LATE))
async def wakeup(request: Request, body: SleepRequest | None = None) -> SleepAnswer:
    """Restore it. Requests go on when nothing is asleep any more."""
    context, (tags, timeout_s) = route_context_of(request), _arguments(body)
    return _answer(await context.run_in_thread(lambda: context.engine.wake(tags, timeout_s)))


def _arguments(body: SleepRequest | None) -> tuple[frozenset[Tag], float]:
    tags = None if body is None else body.tags
    timeout_s = None if body is None else body.timeout_s
    return frozenset(TAGS if tags is None else tags), TIMEOUT_S if timeout_s is None else timeout_s


def _answer(result: SleepResult) -> SleepAnswer:
    return {
        "asleep": list(result.asleep),
        "changed": list(result.changed),
        "size_bytes": result.size_bytes,
        "took_s": result.took_s,
    }
