"""Prefixes of one version are out of reach of requests that come under the next: every request has a salt, another after every install.

vLLM makes a request's `cache_salt` a part of what its prefixes are found by. With it, the KV of running requests may stay where it is at
a commit (the KV policy `reuse`), and nobody who comes later finds it. Owns the salt of one server process, and whether all that it let in
was salted. For that process's event loop.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]

SALTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
"""Ends of the routes that generate, and whose requests can have a salt."""
HARMLESS = (
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_checker", "/collective_rpc", "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/tokenize", "/detokenize"),
    *("/start_profile", "/stop_profile", "/load_lora_adapter", "/unload_lora_adapter"),
)
"""Ends of the routes that something is sent to, and that generate nothing."""


class CacheSalt:
    """Of one server process."""

    def __init__(self) -> None:
        self._boot, self._installs = secrets.token_hex(4), 0
        self.unsalted: str | None = None
        """A route by which a request came that may have left prefixes without a salt."""

    def installed(self) -> None:
        """Weights were changed, or may have been."""
        self._installs += 1

    def note(self, method: str, path: str) -> None:
        """A request came."""
        if method == "POST" and not path.endswith((*SALTED, *HARMLESS)):
            self.unsalted = path

    async def into(self, scope: Message, receive: Receive) -> tuple[Message, Receive]:
        """The same request, with a salt: the user's own is a part of it. What is no JSON object is left for vLLM to refuse."""
        body, ends = await _whole(receive)
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if isinstance(asked, dict):
            own = asked.get("cache_salt")
            asked["cache_salt"] = self._now if own is None else f"{self._now}.{own}"
            body = json.dumps(asked).encode()
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
        salted = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        return salted, _again({"type": "http.request", "body": body, "more_body": False}, ends, receive)

    @property
    def _now(self) -> str:
        return f"{self._boot}-{self._installs}"


async def _whole(receive: Receive) -> tuple[bytes, Message | None]:
    """A request's body; and what came in its place, if its client left."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body, message
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body, None


def _again(first: Message, second: Message | None, receive: Receive) -> Receive:
    """These messages, and then those that come."""
    waiting = [first] if second is None else [first, second]

    async def received() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return received
