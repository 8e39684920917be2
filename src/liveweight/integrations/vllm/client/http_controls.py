"""A vLLM server by its URL: its routes for RL as one of the ways to tell vLLM what to do (see controls)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from liveweight.errors import ChannelClosed, MessageInvalid, Refused, Unavailable
from liveweight.integrations.vllm.client.controls import PauseMode
from liveweight.integrations.vllm.middleware import CACHES
from liveweight.server.client import PendingCall, is_url
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoding import from_json

MIDDLEWARE = "liveweight.integrations.vllm.middleware.Versions"
_SHOWN = 600


class HttpControls:
    """A server, by the routes that it has with VLLM_SERVER_DEV_MODE=1."""

    concurrent = True

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._parts = urlsplit(self.url)
        if not is_url(self.url) or self._parts.hostname is None:
            raise Refused(f"{url} is no URL of a vLLM, such as http://127.0.0.1:8000")

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": info}, deadline)

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self.ask("POST", "/start_weight_update", None, deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        self.ask("POST", "/start_draft_weight_update", None, deadline)
        return True

    def begin(self, deadline: Deadline) -> bool:
        """See VllmControls. Both are sent before one is answered: vLLM answers at the end of a step, and the same step's will do."""
        with ExitStack() as stack:
            paused = self._sent("GET", "/is_paused", None, deadline, stack)
            self._sent("POST", "/start_weight_update", None, deadline, stack)()
            return bool(paused().get("is_paused"))

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self.ask("POST", "/update_weights", {"update_info": info}, deadline)

    def name_version(self, version: str, deadline: Deadline) -> bool:
        """See VllmControls."""
        self.ask("POST", "/update_weight_version", {"new_version": version}, deadline)
        return True

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        body = {} if version is None else {"weight_version": version}
        self.ask("POST", "/finish_weight_update", body, deadline)

    def paused(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        return bool(self.ask("GET", "/is_paused", None, deadline).get("is_paused"))

    def mixes_prefixes(self, deadline: Deadline) -> str | None:
        """See VllmControls."""
        try:
            said = self.ask("GET", CACHES, None, deadline)
        except Unavailable:
            return f"it was not started with --middleware {MIDDLEWARE}"
        return None if said.get("kept_apart") is True else str(said.get("why"))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See VllmControls."""
        how = (
            {"mode": "keep", "clear_cache": "false"}
            if mode == "reuse"
            else {"mode": mode, "clear_cache": "true"}
        )
        self.ask("POST", "/pause?" + urlencode(how), None, deadline)

    def resume(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self.ask("POST", "/resume", None, deadline)

    def ask(self, method: str, path: str, body: object, deadline: Deadline) -> dict[str, Any]:
        """One request of any route, one answer."""
        with ExitStack() as stack:
            return self._sent(method, path, body, deadline, stack)()

    def _sent(
        self, method: str, path: str, body: object, deadline: Deadline, stack: ExitStack
    ) -> Callable[[], dict[str, Any]]:
        """Send a request; what it returns waits for the answer."""
        what = f"{method} {path}"
        with self._telling(what, deadline):
            asked = stack.enter_context(
                closing(PendingCall(self._parts, method, path, self._key, body, deadline))
            )

        def answer() -> dict[str, Any]:
            with self._telling(what, deadline):
                status, raw = asked.answer()
            return self._read(what, status, raw)

        return answer

    @contextmanager
    def _telling(self, what: str, deadline: Deadline) -> Iterator[None]:
        """Errors of the connection as ours."""
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
            said = raw.decode(errors="replace")[:_SHOWN]
            raise Unavailable(f"{self.url} answered {what} with status {status}: {said}")
        try:
            return from_json(raw, dict[str, Any])
        except msgspec.DecodeError as error:
            raise MessageInvalid(f"{self.url} is no vLLM: {error}") from error
