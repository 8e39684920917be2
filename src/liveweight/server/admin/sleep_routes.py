"""`POST /v1/sleep` and `POST /v1/wakeup`: memory that an engine gives back, and takes again. Parse, call, render."""

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
    told,
)
from liveweight.server.openai.request_types import Strict
from liveweight.server.route_context import service_of


class NapRequest(Strict):
    """Both routes. Without tags, all of them."""

    tags: list[Tag] | None = None
    timeout_s: Timeout | None = None


class NapAnswer(TypedDict):
    """What is asleep now, what the call changed, the bytes that all ranks gave back or read again, and how long it took."""

    asleep: list[Tag]
    changed: list[Tag]
    size_bytes: int
    took_s: float


router = APIRouter(tags=["control"], route_class=ControlRoute)


@router.post("/v1/sleep", response_model=NapAnswer, responses=told(CONFLICT, INVALID, LATE))
async def sleep(request: Request, body: NapRequest | None = None) -> NapAnswer:
    """Give the memory of weights, of the cache or of both back; requests stand still until it is taken again."""
    service, (tags, timeout_s) = service_of(request), _asked(body)
    return _answer(await service.elsewhere(lambda: service.engine.sleep(tags, timeout_s)))


@router.post("/v1/wakeup", response_model=NapAnswer, responses=told(CONFLICT, INVALID, LATE))
async def wakeup(request: Request, body: NapRequest | None = None) -> NapAnswer:
    """Take it again. Requests go on when nothing is asleep any more."""
    service, (tags, timeout_s) = service_of(request), _asked(body)
    return _answer(await service.elsewhere(lambda: service.engine.wake(tags, timeout_s)))


def _asked(body: NapRequest | None) -> tuple[frozenset[Tag], float]:
    tags = None if body is None else body.tags
    timeout_s = None if body is None else body.timeout_s
    return frozenset(TAGS if tags is None else tags), TIMEOUT_S if timeout_s is None else timeout_s


def _answer(napped: SleepResult) -> NapAnswer:
    return {
        "asleep": list(napped.asleep),
        "changed": list(napped.changed),
        "size_bytes": napped.size_bytes,
        "took_s": napped.took_s,
    }
