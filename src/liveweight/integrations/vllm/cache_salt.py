"""Keeps cached prefixes of one version from requests of the next: every request gets a salt, and the salt changes with every install.

vLLM includes a request's `cache_salt` in the key of its prefixes. So the KV of running requests may stay at a commit (the KV policy
`reuse`), and no later request finds it. Owns the salt of one server process, and whether every admitted request was salted. For that
process's event loop.
"""

from __future__ import annotations

import secrets
from typing import Any

SALTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
"""Suffixes of the routes that generate, and whose requests can carry a salt."""
HARMLESS = (
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_checker", "/collective_rpc", "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/tokenize", "/detokenize"),
    *("/start_profile", "/stop_profile", "/load_lora_adapter", "/unload_lora_adapter"),
)
"""Suffixes of the POST routes that generate nothing."""


class CacheSalt:
    """Of one server process."""

    def __init__(self) -> None:
        self._boot, self._installs = secrets.token_hex(4), 0
        self.unsalted: str | None = None
        """The route of a request that may have cached prefixes without a salt; None if there was none."""

    def installed(self) -> None:
        """Change the salt: weights were changed, or may have been."""
        self._installs += 1

    def note(self, method: str, path: str) -> None:
        """Record a request, in case its route cannot carry a salt."""
        if method == "POST" and not path.endswith((*SALTED, *HARMLESS)):
            self.unsalted = path

    def put_into(self, request: dict[str, Any]) -> None:
        """Give a request its salt, which includes the user's own."""
        own = request.get("cache_salt")
        request["cache_salt"] = self._now if own is None else f"{self._now}.{own}"

    @property
    def _now(self) -> str:
        return f"{self._boot}-{self._installs}"
