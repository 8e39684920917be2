"""A vLLM server by its URL: implements VllmControls (client/controls) over vLLM's HTTP routes for RL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from liveweight.errors import ChannelClosed, MessageInvalid, Refused, Unavailable
from liveweight.integrations.vllm.client.controls import PauseMode
from liveweight.integrations.vllm.middleware import CACHES, NAMING, naming_query
from liveweight.server.client import PendingCall, is_url
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import from_json
from liveweight.spec.manifest import Version

MIDDLEWARE = "liveweight.integrations.vllm.middleware.Versions"
_SHOWN = 600


class HttpControls:
    """A server that was started with VLLM_SERVER_DEV_MODE=1."""

    concurrent = True

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._parts = urlsplit(self.url)
        if not is_url(self.url) or self._parts.hostname is None:
            raise Refused(f"{url} is no URL of a vLLM, such as http://127.0.0.1:8000")

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self.call("POST", "/init_weight_transfer_engine", {"init_info": info}, deadline)

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self.call("POST", "/start_weight_update", None, deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        self.call("POST", "/start_draft_weight_update", None, deadline)
        return True

    def begin(self, deadline: Deadline) -> bool:
        """See VllmControls. Sends both requests before it reads an answer: vLLM answers at the end of a step, and both can share a step."""
        with ExitStack() as stack:
            paused = self._send("GET", "/is_paused", None, deadline, stack)
            self._send("POST", "/start_weight_update", None, deadline, stack)()
            return bool(paused().get("is_paused"))

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self.call("POST", "/update_weights", {"update_info": info}, deadline)

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """See VllmControls."""
        self.call("POST", f"{NAMING}?{naming_query(version)}", {"new_version": str(version)}, deadline)
        return True

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        body = {} if version is None else {"weight_version": version}
        self.call("POST", "/finish_weight_update", body, deadline)

    def paused(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        return bool(self.call("GET", "/is_paused", None, deadline).get("is_paused"))

    def mixes_prefixes(self, deadline: Deadline) -> str | None:
        """See VllmControls."""
        try:
            caches = self.call("GET", CACHES, None, deadline)
        except Unavailable:
            return f"it was not started with --middleware {MIDDLEWARE}"
        return None if caches.get("kept_apart") is True else str(caches.get("why"))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See VllmControls."""
        how = (
            {"mode": "keep", "clear_cache": "false"}
            if mode == "reuse"
            else {"mode": mode, "clear_cache": "true"}
        )
        self.call("POST", "/pause?" + urlencode(how), None, deadline)

    def resume(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self.call("POST", "/resume", None, deadline)

    def call(self, method: str, path: str, body: object, deadline: Deadline) -> dict[str, Any]:
        """Send one request to any route, and return the answer."""
        with ExitStack() as stack:
            return self._send(method, path, body, deadline, stack)()

    def _send(
        self, method: str, path: str, body: object, deadline: Deadline, stack: ExitStack
    ) -> Callable[[], dict[str, Any]]:
        """Send a request. The returned function waits for the answer."""
        what = f"{method} {path}"
        with self._translate_errors(what, deadline):
            pending = stack.enter_context(
                closing(PendingCall(self._parts, method, path, self._key, body, deadline))
            )

        def answer() -> dict[str, Any]:
            with self._translate_errors(what, deadline):
                status, raw = pending.answer()
            return self._read(what, status, raw)

        return answer

    @contextmanager
    def _translate_errors(self, what: str, deadline: Deadline) -> Iterator[None]:
        """Translate errors of the connection into ours."""
        try:
            yield
        except TimeoutError:
            raise deadline.exceeded(f"{self.url} to answer {what}") from None
        except OSError as error:
            raise ChannelClosed(f"{self.url} cannot be reached: {error.strerror or error}") from error
        except (HTTPException, ValueError) as error:
            raise MessageInvalid(f"{self.url} is no vLLM: {error or type(error).__name__}") from error

    def _read(self, what: str, status: int, raw: bytes) -> dict[str, Any]:
        if status == 404:
            raise Unavailable(f"{self.url} has no {what}: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if status != 200:
            text = raw.decode(errors="replace")[:_SHOWN]
            raise Unavailable(f"{self.url} answered {what} with status {status}: {text}")
        try:
            return from_json(raw, dict[str, Any])
        except msgspec.DecodeError as error:
            raise MessageInvalid(f"{self.url} is no vLLM: {error}") from error
