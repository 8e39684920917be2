"""`/health` and `/metrics`: the state of the engine, for load balancers and for Prometheus."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from liveweight.server.errors import error_body
from liveweight.server.openai.token_versions import weights_form
from liveweight.server.response_types import HealthAnswer
from liveweight.server.route_context import route_context_of

router = APIRouter(tags=["operations"])


@router.get(
    "/health",
    response_model=None,
    responses={
        200: {"model": HealthAnswer, "description": "It takes requests."},
        503: {
            "model": HealthAnswer,
            "description": "It is stopping, has lost a rank, is torn or asleep, or waits for its weights.",
        },
    },
)
async def health(request: Request) -> Response:
    """Whether requests are taken, and how many there are."""
    engine = route_context_of(request).engine
    status = engine.status()
    words: dict[str, Literal["ok", "asleep", "torn", "pending_weights", "failed"]] = {
        "running": "ok",
        "asleep": "asleep",
        "torn": "torn",
        "pending_weights": "pending_weights",
        "failed": "failed",
    }
    body: dict[str, object] = {
        "status": words.get(status.state, "stopping"),
        "model": engine.name,
        "tp": engine.config.tp,
        "running": status.running,
        "waiting": status.waiting,
        "kv_blocks_total": status.blocks_total,
        "kv_blocks_free": status.blocks_free,
        "weight_version": weights_form(status.weights),
    }
    if status.fault is not None:
        body |= error_body(status.fault)
    code = 200 if status.state == "running" else 503
    return Response(msgspec.json.encode(body), code, media_type="application/json")


@router.get(
    "/metrics",
    response_model=None,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus."}
    },
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    """The registry in Prometheus' text form."""
    text = generate_latest(route_context_of(request).registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
