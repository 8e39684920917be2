"""Answers over HTTP: whole, or as a stream of events while they grow.

Owns the envelope, the count of tokens, and what happens when the client leaves or a rank does. The form of a choice is choices'.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from liveweight.engine.serving.requests import Delta
from liveweight.server.engine_bridge import DeltaDispatcher, EngineBridge
from liveweight.server.engine_port import EnginePort
from liveweight.server.errors import INTERNAL, error_body, kind_of
from liveweight.server.open_requests import OpenRequests
from liveweight.server.openai.choices import ChatChoice, ChoiceWriter, CompletionChoice
from liveweight.server.openai.client_connection import while_connected
from liveweight.server.openai.generation_requests import EngineRequest

_LOGGER = logging.getLogger("liveweight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a route names its answers."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[..., ChoiceWriter]
    prompt_at_top: bool


COMPLETION = Form(
    prefix="cmpl",
    whole="text_completion",
    chunk="text_completion",
    choice=CompletionChoice,
    prompt_at_top=False,
)
CHAT = Form(
    prefix="chatcmpl",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    choice=ChatChoice,
    prompt_at_top=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One HTTP request, ready to be handed to the engine."""

    form: Form
    requests: Sequence[EngineRequest]
    per_prompt: int
    token_ids: bool
    stream: bool
    usage: bool


class Usage:
    """Counts tokens: a prompt once, however many choices it has."""

    def __init__(self, order: Order) -> None:
        self._prompt = sum(len(request.prompt) for request in order.requests[:: order.per_prompt])
        self._every = order.per_prompt
        self._generated = 0
        self._cached: dict[int, int] = {}

    def add(self, index: int, delta: Delta) -> None:
        """Count a piece of an answer."""
        self._generated += len(delta.tokens)
        if index % self._every == 0:
            self._cached[index] = max(self._cached.get(index, 0), delta.cached_tokens)

    def form(self) -> dict[str, Any]:
        """The `usage` field of an answer."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class HttpReply(Response):
    """Answers one order. Submits to the engine before the response starts, so that a refusal has its own status."""

    def __init__(
        self, order: Order, engine: EnginePort, dispatcher: DeltaDispatcher, open_requests: OpenRequests
    ) -> None:
        super().__init__()
        self._order, self._engine, self._dispatcher, self._open_requests = (
            order,
            engine,
            dispatcher,
            open_requests,
        )
        self._choices = [
            order.form.choice(index, request, engine, token_ids=order.token_ids)
            for index, request in enumerate(order.requests)
        ]
        self._usage = Usage(order)
        self._head: dict[str, Any] = {
            "id": f"{order.form.prefix}-{secrets.token_hex(12)}",
            "object": order.form.chunk if order.stream else order.form.whole,
            "created": int(time.time()),
            "model": engine.name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        bridge = EngineBridge(self._engine, self._dispatcher, self._order.requests)
        with bridge, self._open_requests.register(self._head["id"], bridge):
            work = self._stream(bridge, send) if self._order.stream else self._whole(bridge, send)
            await while_connected(receive, work)

    async def _whole(self, bridge: EngineBridge, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async for arrived in bridge.deltas():
            for index, delta in arrived:
                deltas[index].append(delta)
                self._usage.add(index, delta)
        choices = [choice.whole(pieces) for choice, pieces in zip(self._choices, deltas, strict=True)]
        body = {**self._envelope(choices), **self._prompt_ids(), "usage": self._usage.form()}
        encoded = msgspec.json.encode(body)
        size = str(len(encoded)).encode()
        await send(_start((b"content-type", b"application/json"), (b"content-length", size)))
        await send({"type": "http.response.body", "body": encoded})

    async def _stream(self, bridge: EngineBridge, send: Send) -> None:
        headers = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
        await send(_start(*headers))
        try:
            async with aclosing(self._events(bridge)) as events:
                async for some in events:
                    await send(_part(some))
                    await asyncio.sleep(
                        0
                    )  # a client that left is noticed between two writes, also in a burst
            await send(_part([b"[DONE]"]))
        except Exception as error:
            if kind_of(error) is INTERNAL:
                _LOGGER.exception("a stream ended with an error")
            await send(_part([msgspec.json.encode(error_body(error))]))
        await send({"type": "http.response.body", "body": b""})

    async def _events(self, bridge: EngineBridge) -> AsyncGenerator[list[bytes], None]:
        """What is ready to be sent, together."""
        openings = [opening for choice in self._choices if (opening := choice.opening()) is not None]
        first = self._prompt_ids()
        yield [self._chunk([opening], first if at == 0 else None) for at, opening in enumerate(openings)]
        async for arrived in bridge.deltas():
            for index, delta in arrived:
                self._usage.add(index, delta)
            yield [self._chunk([self._choices[index].piece(delta)]) for index, delta in arrived]
        if self._order.usage:
            yield [msgspec.json.encode({**self._envelope([]), "usage": self._usage.form()})]

    def _chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self._order.usage else {}
        return msgspec.json.encode({**self._envelope(choices), **(more or {}), **usage})

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def _prompt_ids(self) -> dict[str, Any]:
        wanted = self._order.token_ids and self._order.form.prompt_at_top
        return {"prompt_token_ids": list(self._order.requests[0].prompt)} if wanted else {}


def _start(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def _part(events: Sequence[bytes]) -> dict[str, Any]:
    body = b"".join(b"data: " + event + b"\n\n" for event in events)
    return {"type": "http.response.body", "body": body, "more_body": True}
