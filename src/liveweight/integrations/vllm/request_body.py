"""The body of a request to vLLM's server, read whole, so that the middleware can change it before vLLM sees it. ASGI only."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]


class RequestBody:
    """One request's body. `fields` is None for a body that is no JSON object: it is left for vLLM to refuse, byte for byte."""

    def __init__(self, raw: bytes, ends: Message | None) -> None:
        self._raw, self._ends = raw, ends
        try:
            read = json.loads(raw)
        except (ValueError, RecursionError):
            read = None
        self.fields: dict[str, Any] | None = read if isinstance(read, dict) else None

    @classmethod
    async def read(cls, receive: Receive) -> RequestBody:
        """Read all pieces of it. A client that leaves in between is remembered, for vLLM to notice."""
        pieces: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return cls(b"".join(pieces), message)
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                return cls(b"".join(pieces), None)

    def passed_on(self, scope: Message, receive: Receive) -> tuple[Message, Receive]:
        """The request for vLLM, with the fields as they are now, in one piece; then what else the server receives."""
        body = self._raw if self.fields is None else json.dumps(self.fields).encode()
        dropped = (b"content-length", b"transfer-encoding")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in dropped]
        first: Message = {"type": "http.request", "body": body, "more_body": False}
        waiting = [first] if self._ends is None else [first, self._ends]

        async def received() -> Message:
            return waiting.pop(0) if waiting else await receive()

        return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, received
