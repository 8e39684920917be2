"""The routes of OpenAI's interface: parse, call, render."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from liveweight.server.errors import UnknownModel
from liveweight.server.openai.generation_requests import EngineRequest, chat_requests, completion_requests
from liveweight.server.openai.replies import CHAT, COMPLETION, Form, HttpReply, Order
from liveweight.server.openai.request_types import ChatRequest, CompletionRequest, GenerateRequest
from liveweight.server.response_types import (
    ChatAnswer,
    CompletionAnswer,
    Error,
    ModelAnswer,
    ModelsAnswer,
)
from liveweight.server.route_context import RouteContext, route_context_of

TAG = "openai"
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "The request is wrong; `param` says where."},
    404: {"model": Error, "description": "The model is not served here."},
    409: {"model": Error, "description": "The request demands another version than the one that serves."},
    429: {"model": Error, "description": "As many requests wait as may wait."},
    503: {"model": Error, "description": "The engine is stopping, or has lost a rank."},
    "default": {"model": Error, "description": "Any other error."},
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, an error, or [DONE]."}},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"itemSchema": _EVENT}}

router = APIRouter(tags=[TAG])


@router.post(
    "/v1/completions",
    response_model=None,
    responses={**ERRORS, 200: {"model": CompletionAnswer, "content": _STREAM, "description": "The answer."}},
)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    context = route_context_of(request)
    requests = await completion_requests(body, context.engine)
    return HttpReply(
        _order(COMPLETION, requests, body), context.engine, context.dispatcher, context.open_requests
    )


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={**ERRORS, 200: {"model": ChatAnswer, "content": _STREAM, "description": "The answer."}},
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    context = route_context_of(request)
    requests = await chat_requests(body, context.engine)
    return HttpReply(_order(CHAT, requests, body), context.engine, context.dispatcher, context.open_requests)


@router.get("/v1/models", response_model=ModelsAnswer)
async def models(request: Request) -> ModelsAnswer:
    """The model that is served."""
    return {"object": "list", "data": [_model(route_context_of(request))]}


@router.get("/v1/models/{model:path}", response_model=ModelAnswer, responses={404: ERRORS[404]})
async def model(model: str, request: Request) -> ModelAnswer:
    """One model, by its name."""
    context = route_context_of(request)
    if model != context.engine.name:
        raise UnknownModel(f"no model {model!r} here, only {context.engine.name!r}", param="model")
    return _model(context)


def _order(form: Form, requests: list[EngineRequest], body: GenerateRequest) -> Order:
    return Order(
        form=form,
        requests=requests,
        per_prompt=body.choices,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        usage=body.wants_usage,
    )


def _model(context: RouteContext) -> ModelAnswer:
    return {
        "id": context.engine.name,
        "object": "model",
        "created": context.created,
        "owned_by": "liveweight",
        "max_model_len": context.engine.context,
        "logprobs_mode": context.engine.config.logprobs_mode,
    }
