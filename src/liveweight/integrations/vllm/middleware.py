"""ASGI middleware for vLLM's server: every answer says which version served when it was admitted, and which when it was finished; and no
request finds prefixes of an earlier version than that of its admission. A request that demands another version than the one that serves is
answered with 409, as by the embedded engine, and vLLM does not see it.

    vllm serve MODEL --middleware liveweight.integrations.vllm.middleware.Versions ...

If the two differ, the answer is of both: vLLM does not tell its clients which token came from which. Whole answers carry both versions in
their headers. Streams carry the first in their headers, and both in a comment before their end, which clients of server-sent events skip.
The route CACHES reports whether prefixes of versions are kept apart: trainers ask before a commit that keeps prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode

from msgspec.structs import asdict

from liveweight.errors import RequestInvalid, VersionNotServed
from liveweight.integrations.vllm.cache_salt import SALTED, CacheSalt
from liveweight.integrations.vllm.request_body import RequestBody
from liveweight.spec.decoders import converted
from liveweight.spec.manifest import Version
from liveweight.spec.version_demand import VersionDemand

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

CACHES = "/liveweight/caches"
INSTALLING = "/update_weights"
NAMING = "/update_weight_version"
DEMAND = "weight_version"
UNKNOWN_RUN = ""
"""The run of a version of which only the label is known, as after a start, or in another server process than the one a trainer told."""
ADMITTED, FINISHED = b"x-weight-version", b"x-weight-version-finished"


class Versions:
    """Wraps vLLM's application. Asks the engine for the version, since only the engine knows it for certain."""

    def __init__(self, app: App) -> None:
        self._app, self._salt = app, CacheSalt()
        self._named: Version | None = None
        """The version that a trainer named last, with what vLLM does not keep of it."""

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
        elif path.endswith(NAMING) and scope["method"] == "POST":
            await self._app(scope, receive, send)
            self._named = version_in(scope.get("query_string", b""))
        elif path.endswith(SALTED) and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the version first, then the salt: a request that finds prefixes of a version also reports that version as its admission."""
        engine = scope["app"].state.engine_client
        body = await RequestBody.read(receive)
        label = await engine.get_weight_version()
        if body.fields is not None:
            try:
                _check_demand(body.fields.pop(DEMAND, None), self._serving(label))
            except (RequestInvalid, VersionNotServed) as error:
                await _refuse(error, scope, receive, send)
                return
            self._salt.put_into(body.fields)
        salted, received = body.passed_on(scope, receive)
        await self._app(salted, received, _Answer(engine, label, send).pass_on)

    def _serving(self, label: str) -> Version:
        """What serves: the version that was named last, if vLLM has its label; else only the label is known."""
        named = self._named
        return named if named is not None and str(named) == label else Version(run=UNKNOWN_RUN, label=label)

    def _caches(self, engine: Any) -> dict[str, Any]:
        """If several processes serve, each has a salt of its own, and sees only some of the requests."""
        processes = engine.vllm_config.parallel_config._api_process_count
        why = None if processes == 1 else f"{processes} processes serve"
        if self._salt.unsalted is not None:
            why = f"a request came by {self._salt.unsalted}"
        return {"kept_apart": why is None, "why": why}


def naming_query(version: Version) -> str:
    """The query with which a trainer names a version on the route NAMING: vLLM itself takes only the label, and ignores the query."""
    known = {name: value for name, value in asdict(version).items() if value is not None}
    return urlencode(known)


def version_in(query: bytes) -> Version | None:
    """The version in a query of `naming_query`; None if it has none."""
    try:
        return converted(dict(parse_qsl(query.decode())), Version, strict=False)
    except ValueError:
        return None


def _check_demand(given: object, serving: Version) -> None:
    """Raise VersionNotServed if that version does not meet the request's demand, RequestInvalid if it is no demand."""
    if given is None:
        return
    try:
        demand = converted(given, VersionDemand)
    except ValueError as error:
        raise RequestInvalid(f"{DEMAND}: {error}") from error
    demand.check(serving)


async def _refuse(
    error: RequestInvalid | VersionNotServed, scope: Scope, receive: Receive, send: Send
) -> None:
    from liveweight.server.errors import (
        error_response,
    )  # a trainer, which reads this module, has no need of it

    await error_response(error, param=DEMAND)(scope, receive, send)


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
