"""Call ids: every request to a control route gets an id of its own, which every response carries, errors too.

The server chooses the id: no two calls of one server share one. It names the round that the call runs.
"""

from __future__ import annotations

import secrets
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-liveweight-call"
_KEY = "liveweight.call"


class CallIds:
    """Middleware around everything that may answer a control route, the guard's refusals included."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        call = secrets.token_hex(8)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (HEADER.encode(), call.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app({**scope, _KEY: call}, receive, named)


def call_of(request: Request) -> str:
    """The call id of a request."""
    return cast(str, request.scope[_KEY])
