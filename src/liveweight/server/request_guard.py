"""The request guard before all routes: checks keys, limits the size and time of bodies.

Refuses by itself, in the shape of every error (server/errors), before a route is looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from liveweight.server.errors import ApiError, BodyTooLarge, BodyTooSlow, WrongKey, error_response

DISCARDED_BYTES = 64 << 20
CONTROL_PATHS = frozenset(
    {
        "/v1/weights",
        "/v1/weights/undo",
        "/v1/weights/verify",
        "/v1/update_weights",
        "/v1/pause",
        "/v1/resume",
        "/v1/is_paused",
        "/v1/abort_requests",
        "/v1/sleep",
        "/v1/wakeup",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """What the guard lets through. Paths in `open_paths` need no key; without a key nothing does.

    `control_paths` need `control_key`, and where there is none, the key of all others.
    """

    api_key: str | None = None
    control_key: str | None = None
    control_paths: frozenset[str] = CONTROL_PATHS
    open_paths: frozenset[str] = frozenset({"/health"})
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0


class ClientGone(Exception):
    """The client left before its body was complete."""


class Guard:
    """Middleware: checks the key, then reads the body within its limits, then lets the request in."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except BodyTooLarge as error:
            await self._discard(receive)
            await error_response(error)(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except ClientGone:
            return
        else:
            await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        wanted = self._wanted(scope["path"])
        if wanted is None:
            return
        given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        kind, _, key = given.partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), wanted.encode()):
            raise WrongKey("this server needs a key: Authorization: Bearer KEY")

    def _wanted(self, path: str) -> str | None:
        access = self._access
        if path in access.open_paths:
            return None
        controls = path in access.control_paths and access.control_key is not None
        return access.control_key if controls else access.api_key

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._access.max_body_bytes
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._access.body_timeout_s):
                async for part in _parts(receive):
                    size += len(part)
                    if size > limit:
                        raise BodyTooLarge(f"the body is larger than {limit} bytes")
                    parts.append(part)
        except TimeoutError:
            waited_s = self._access.body_timeout_s
            raise BodyTooSlow(f"the body was not complete after {waited_s:.0f} s") from None
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Read on for a while: a client that still sends would not see the answer."""
        left = DISCARDED_BYTES
        with contextlib.suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(self._access.body_timeout_s):
                async for part in _parts(receive):
                    left -= len(part)
                    if left < 0:
                        return


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes from the client: that it leaves."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay
