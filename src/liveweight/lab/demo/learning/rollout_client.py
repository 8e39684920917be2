"""The rollouts' HTTP client: one persistent connection, one request after the other."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from liveweight.errors import ChannelClosed, DeadlineExceeded, MessageInvalid

ANSWER_S = 60.0
ADMITTED, FINISHED = "x-weight-version", "x-weight-version-finished"
"""Headers that integrations/vllm/middleware adds to a vLLM's answers."""


class CompletionAnswerBody(NamedTuple):
    """An answer: its body, and the versions at its admission and at its end, if the engine reports only those."""

    body: bytes
    served: tuple[str, str] | None


class Completions:
    """An engine's completions, for one thread; `interrupt` is for any thread. Connects at the first request."""

    def __init__(self) -> None:
        self._url = ""
        self._connection: http.client.HTTPConnection | None = None

    def complete(self, url: str, body: Mapping[str, Any]) -> CompletionAnswerBody:
        """Send a request, and return the answer. ChannelClosed if the engine is gone or ending, DeadlineExceeded if it does not answer."""
        connection = self._connected(url)
        try:
            connection.request(
                "POST", "/v1/completions", msgspec.json.encode(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            raw = response.read()
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(f"{url} to answer a completion", ANSWER_S) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ChannelClosed(f"{url} cannot be reached: {error or type(error).__name__}") from error
        if response.status >= 500:
            raise ChannelClosed(f"{url} answered with status {response.status}")
        if response.status != 200:
            raise MessageInvalid(f"{url} answered with status {response.status}: {raw[:200]!r}")
        admitted, finished = response.headers.get(ADMITTED), response.headers.get(FINISHED)
        return CompletionAnswerBody(
            raw, None if admitted is None or finished is None else (admitted, finished)
        )

    def interrupt(self) -> None:
        """End the current wait for an answer at once, with ChannelClosed."""
        connection = self._connection
        opened = None if connection is None else connection.sock
        if opened is not None:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, url: str) -> http.client.HTTPConnection:
        if self._connection is None or self._url != url:
            self.close()
            parts = urlsplit(url)
            self._url = url
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
        return self._connection
