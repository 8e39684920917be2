"""ASGI middleware for vLLM's server: every answer says which version served when it was admitted, and which when it was finished.

    vllm serve MODEL --middleware liveweight.integrations.vllm.middleware.Versions ...

Where the two differ the answer is of both: vLLM does not tell its clients which token came from which. Answers in one piece say it in their
headers. Streams say the first in their headers, and both in a comment before their end, which clients of server-sent events skip.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ADMITTED, FINISHED = b"x-weight-version", b"x-weight-version-finished"


class Versions:
    """Wraps vLLM's application. It asks the engine, which knows: not a variable of this process."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or not scope["path"].endswith(GENERATING):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        await self._app(scope, receive, _Answer(engine, await engine.get_weight_version(), send).pass_on)


class _Answer:
    """What is sent of one answer, on its way out."""

    def __init__(self, engine: Any, admitted: str, send: Send) -> None:
        self._engine, self._admitted, self._send = engine, admitted, send
        self._streams = False

    async def pass_on(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            self._streams = kind.startswith(b"text/event-stream")
            headers.append((ADMITTED, self._admitted.encode()))
            if not self._streams:  # vLLM sends nothing of it before it is finished
                headers.append((FINISHED, (await self._engine.get_weight_version()).encode()))
            message = {**message, "headers": headers}
        elif self._streams and not message.get("more_body", False):
            await self._send({**message, "body": await self._comment(), "more_body": True})
        await self._send(message)

    async def _comment(self) -> bytes:
        said = {"admitted": self._admitted, "finished": await self._engine.get_weight_version()}
        return f": weight-version {json.dumps(said)}\n\n".encode()
