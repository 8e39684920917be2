"""Choices: an answer, or a piece of one, as the two routes write it.

Owns what a choice has. A whole answer is the one piece that holds everything, so plain and streamed answers cannot differ.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol

from liveweight.engine.serving.requests import Delta
from liveweight.server.engine_port import EnginePort
from liveweight.server.openai.generation_requests import EngineRequest
from liveweight.server.openai.logprobs import ChatLogprobs, CompletionLogprobs
from liveweight.server.openai.token_versions import Attribution


class ChoiceWriter(Protocol):
    """Writes the pieces of one choice, in order."""

    def opening(self) -> dict[str, Any] | None:
        """A piece that a stream sends before the first token."""

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A piece of a stream."""

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Everything at once."""


class CommonFields:
    """What choices of both routes have."""

    def __init__(self, index: int, request: EngineRequest, engine: EnginePort, *, token_ids: bool) -> None:
        self._index, self._request, self._token_ids = index, request, token_ids
        self._routing_shape = (engine.spec.sparse_layers, engine.spec.experts_per_token)
        self._attribution = Attribution()

    def of(self, delta: Delta) -> dict[str, Any]:
        """The fields of a piece."""
        fields: dict[str, Any] = {"index": self._index, "finish_reason": delta.finish}
        fields |= self._attribution.fields(delta.tokens)
        if delta.reused_kv:
            fields["kv"] = "reused"
        if self._token_ids:
            fields["token_ids"] = [token.id for token in delta.tokens]
        if self._request.sampling.routing and delta.last:
            fields["routed_experts"] = self._experts(delta.routing)
        return fields

    def _experts(self, routing: bytes | None) -> dict[str, Any] | None:
        if routing is None:
            return None
        layers, chosen = self._routing_shape
        tokens = len(routing) // (2 * layers * chosen)
        data = base64.b64encode(routing).decode()
        return {"data": data, "shape": [tokens, layers, chosen], "dtype": "uint16"}


class CompletionChoice:
    """A choice of `/v1/completions`. The prompt's ids, if asked for, come with its first piece."""

    def __init__(self, index: int, request: EngineRequest, engine: EnginePort, *, token_ids: bool) -> None:
        self._common = CommonFields(index, request, engine, token_ids=token_ids)
        self._prompt = list(request.prompt) if token_ids else None
        self._logprobs = None if request.sampling.logprobs is None else CompletionLogprobs(engine.tokenizer)

    def opening(self) -> dict[str, Any] | None:
        """Nothing: the first piece has the first token."""
        return None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A piece: its text, and the fields of its tokens."""
        logprobs = None if self._logprobs is None else self._logprobs.form(delta.tokens)
        fields = {**self._common.of(delta), "text": delta.text, "logprobs": logprobs}
        if self._prompt is not None:
            fields["prompt_token_ids"], self._prompt = self._prompt, None
        return fields

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The one piece that holds everything."""
        return self.piece(merged(deltas))


class ChatChoice:
    """A choice of `/v1/chat/completions`: the same fields below `delta` in a stream and below `message` at once."""

    def __init__(self, index: int, request: EngineRequest, engine: EnginePort, *, token_ids: bool) -> None:
        self._common = CommonFields(index, request, engine, token_ids=token_ids)
        self._logprobs = None if request.sampling.logprobs is None else ChatLogprobs(engine.tokenizer)

    def opening(self) -> dict[str, Any] | None:
        """The role, without text."""
        return self._written(Delta(), {"delta": {"role": "assistant", "content": ""}})

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A piece: its text, and the fields of its tokens."""
        return self._written(delta, {"delta": {"content": delta.text}})

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The whole message."""
        everything = merged(deltas)
        return self._written(everything, {"message": {"role": "assistant", "content": everything.text}})

    def _written(self, delta: Delta, text: dict[str, Any]) -> dict[str, Any]:
        wanted = self._logprobs is not None and delta.tokens
        logprobs = self._logprobs.form(delta.tokens) if self._logprobs is not None and wanted else None
        return {**self._common.of(delta), **text, "logprobs": logprobs}


def merged(deltas: Sequence[Delta]) -> Delta:
    """One delta with the content of all of them."""
    last = deltas[-1]
    return Delta(
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        text="".join(delta.text for delta in deltas),
        finish=last.finish,
        routing=last.routing,
        cached_tokens=last.cached_tokens,
        reused_kv=any(delta.reused_kv for delta in deltas),
    )
