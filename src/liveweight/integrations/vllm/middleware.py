"""ASGI middleware for vLLM's server: every answer says which version served when it was admitted, and which when it was finished; and no
request finds prefixes of an earlier version than that of its admission.

    vllm serve MODEL --middleware liveweight.integrations.vllm.middleware.Versions ...

If the two differ, the answer is of both: vLLM does not tell its clients which token came from which. Whole answers carry both versions in
their headers. Streams carry the first in their headers, and both in a comment before their end, which clients of server-sent events skip.
The route CACHES reports whether prefixes of versions are kept apart: trainers ask before a commit that keeps prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from liveweight.integrations.vllm.cache_salt import SALTED, CacheSalt

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

CACHES = "/liveweight/caches"
INSTALLING = "/update_weights"
ADMITTED, FINISHED = b"x-weight-version", b"x-weight-version-finished"


class Versions:
    """Wraps vLLM's application. Asks the engine for the version, since only the engine knows it for certain."""

    def __init__(self, app: App) -> None:
        self._app, self._salt = app, CacheSalt()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        self._salt.note(scope["method"], path)
        if path == CACHES:
            await _send_json(self._caches(scope["app"].state.engine_client), send)
        elif path.endswith(INSTALLING):
            try:
                await self._app(scope, receive, send)
            finally:
                self._salt.installed()
        elif path.endswith(SALTED) and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the version first, then the salt: a request that finds prefixes of a version also reports that version as its admission."""
        engine = scope["app"].state.engine_client
        answer = _Answer(engine, await engine.get_weight_version(), send)
        salted, received = await self._salt.into(scope, receive)
        await self._app(salted, received, answer.pass_on)

    def _caches(self, engine: Any) -> dict[str, Any]:
        """If several processes serve, each has a salt of its own, and sees only some of the requests."""
        processes = engine.vllm_config.parallel_config._api_process_count
        why = None if processes == 1 else f"{processes} processes serve"
        if self._salt.unsalted is not None:
            why = f"a request came by {self._salt.unsalted}"
        return {"kept_apart": why is None, "why": why}


async def _send_json(answer: dict[str, Any], send: Send) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Answer:
    """Adds the versions to one answer on its way out."""

    def __init__(self, engine: Any, admitted: str, send: Send) -> None:
        self._engine, self._admitted, self._send = engine, admitted, send
        self._streams = False

    async def pass_on(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            self._streams = kind.startswith(b"text/event-stream")
            headers.append((ADMITTED, self._admitted.encode()))
            if not self._streams:  # vLLM sends a whole answer only once it is finished
                headers.append((FINISHED, (await self._engine.get_weight_version()).encode()))
            message = {**message, "headers": headers}
        elif self._streams and not message.get("more_body", False):
            await self._send({**message, "body": await self._comment(), "more_body": True})
        await self._send(message)

    async def _comment(self) -> bytes:
        versions = {"admitted": self._admitted, "finished": await self._engine.get_weight_version()}
        return f": weight-version {json.dumps(versions)}\n\n".encode()
