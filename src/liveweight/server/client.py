"""The client of an engine's operator routes (server/admin): state of its weights, address of its leader, update, undo, pause, sleep.

Owns URLs, the key and the errors of a response. Rounds do not go over HTTP.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from liveweight.engine.status import PENDING
from liveweight.errors import (
    ChannelClosed,
    KeyRefused,
    LiveWeightError,
    MessageInvalid,
    WeightsPending,
    WireError,
    WrongState,
    catalogue,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoders import from_json

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""The hosts of URLs that are this host."""

ANSWER_BYTES_MAX = 64 << 20
GRACE_S = 2.0
"""How much longer than the engine its client waits: the engine's own timeout error says more."""

FIND_S = 10.0
"""How long an engine may take to return the address of its leader."""

LAST_STEPS_S = 30.0
"""How much longer than its own timeout an update may take: a vote or commit that began in time is finished."""


def is_url(text: str) -> bool:
    """Whether it names an engine's HTTP interface, and not a leader."""
    return text.startswith(("http://", "https://"))


def wire_address(url: str, key: str | None, deadline: Deadline) -> str:
    """Where the leader of the engine at that URL listens. A WireError, DeadlineExceeded or WrongState if it cannot be found out."""
    return leader_of(url, EngineClient(url, key).weights(deadline.within(FIND_S)))


def leader_of(url: str, weights: Mapping[str, Any]) -> str:
    """The leader's address in an engine's `/v1/weights` answer. ChannelClosed if it cannot be reached from this host, WeightsPending while
    the engine's ranks, and its leader with them, are being started again."""
    address, state = weights.get("address"), weights.get("state")
    if isinstance(state, str) and state.startswith(PENDING):
        raise WeightsPending(f"{url} is {state}: its ranks are being started again")
    if address is None:
        raise WrongState("it serves without live updates", f"an update of {url}")
    if not isinstance(address, str):
        raise MessageInvalid(f"{url} is no engine of ours: its address is no text")
    if address.startswith("ipc://") and not Path(address.removeprefix("ipc://")).exists():
        if urlsplit(url).hostname in LOOPBACK:
            raise ChannelClosed(
                f"{url} takes updates at {address}, and nobody listens there now: its ranks are being started again, or it is in a "
                "container that does not share that directory"
            )
        raise ChannelClosed(f"{url} takes updates at {address}, which is not on this host")
    return address


class EngineClient:
    """One engine's control routes. Every call is a connection of its own, and ends with its deadline."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self._key = url.rstrip("/"), key
        try:
            self._parts = urlsplit(self.url)
            usable = is_url(self.url) and self._parts.hostname is not None and self._parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise MessageInvalid(f"{url} is no URL of an engine, such as http://127.0.0.1:8000")

    def weights(self, deadline: Deadline) -> dict[str, Any]:
        """What the engine serves, and its last rounds."""
        answer = self._call("GET", "/v1/weights", None, deadline)
        if not {"state", "version", "address"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what it serves")
        return answer

    def undo(self, deadline: Deadline) -> dict[str, Any]:
        """Undo to the version before; returns what the engine serves then."""
        return self._call("POST", "/v1/weights/undo", {"timeout_s": _left_s(deadline)}, deadline)

    def update(self, fields: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Update to a version of the engine's source; returns the route's answer. `fields` are the fields of the route's body."""
        deadline = Deadline.after(timeout_s + LAST_STEPS_S)
        answer = self._call("POST", "/v1/update_weights", {**fields, "timeout_s": timeout_s}, deadline)
        if not {"version", "outcome", "results"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what came of the update")
        return answer

    def verify(self, fields: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Digest live weights and compare them; returns the route's answer. `fields` are the fields of the route's body."""
        body = {**fields, "timeout_s": timeout_s}
        answer = self._call("POST", "/v1/weights/verify", body, Deadline.after(timeout_s))
        if not {"match", "version", "digest", "mismatches"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what it found")
        return answer

    def pause(self, mode: str, deadline: Deadline) -> dict[str, Any]:
        """Pause requests."""
        return self._call("POST", "/v1/pause", {"mode": mode, "timeout_s": _left_s(deadline)}, deadline)

    def resume(self, deadline: Deadline) -> dict[str, Any]:
        """Resume requests."""
        return self._call("POST", "/v1/resume", None, deadline)

    def sleep(self, tags: Sequence[str] | None, timeout_s: float) -> dict[str, Any]:
        """Release memory; returns what is asleep then."""
        return self._call(
            "POST", "/v1/sleep", {"tags": tags, "timeout_s": timeout_s}, Deadline.after(timeout_s)
        )

    def wakeup(self, tags: Sequence[str] | None, timeout_s: float) -> dict[str, Any]:
        """Restore memory; returns what is still asleep then."""
        return self._call(
            "POST", "/v1/wakeup", {"tags": tags, "timeout_s": timeout_s}, Deadline.after(timeout_s)
        )

    def _call(self, method: str, path: str, body: object, deadline: Deadline) -> dict[str, Any]:
        try:
            status, raw = call_once(self._parts, method, path, self._key, body, deadline)
        except TimeoutError:
            raise deadline.exceeded(f"{self.url} to answer {method} {path}") from None
        except OSError as error:
            raise ChannelClosed(f"{self.url} cannot be reached: {error.strerror or error}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise MessageInvalid(
                f"{self.url} is no engine of ours: {error or type(error).__name__}"
            ) from error
        return self._checked(status, raw)

    def _checked(self, status: int, raw: bytes) -> dict[str, Any]:
        """The parsed answer. Raises the engine's own error, if the answer is one."""
        try:
            answer = from_json(raw, dict[str, Any])
        except msgspec.DecodeError:
            answer = {}
        if status == 200 and answer:
            return answer
        if status == 401:
            raise KeyRefused(f"{self.url} refused the key" if self._key else f"{self.url} wants a key")
        problem = answer.get("error")
        if not isinstance(problem, dict) or status == 404:
            raise MessageInvalid(f"{self.url} is no engine of ours: it answered with status {status}")
        raise _error(problem.get("code"), f"{self.url}: {problem.get('message')}")


def call_once(
    url: SplitResult, method: str, path: str, key: str | None, body: object, deadline: Deadline
) -> tuple[int, bytes]:
    """One request, one response. Raises what http.client raises; TimeoutError GRACE_S after the deadline."""
    with closing(PendingCall(url, method, path, key, body, deadline)) as call:
        return call.answer()


class PendingCall:
    """A request that has been sent; its response is read later, so that several can be in flight. Raises as `call_once` does."""

    def __init__(
        self, url: SplitResult, method: str, path: str, key: str | None, body: object, deadline: Deadline
    ) -> None:
        self._ends = Deadline(deadline.ends_s + GRACE_S, deadline.began_s)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        timeout_s = max(0.001, self._ends.remaining_s())
        self._connection = kind(cast(str, url.hostname), url.port, timeout=timeout_s)
        headers = {"Accept": "application/json", "Connection": "close"}
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        self.headers: Mapping[str, str] = {}
        """The headers of the response, with names in small letters, once `answer` has returned."""
        try:
            self._connection.request(
                method, url.path + path, None if body is None else msgspec.json.encode(body), headers
            )
        except BaseException:
            self.close()
            raise

    def answer(self) -> tuple[int, bytes]:
        """Wait for the response: status and body."""
        response = self._connection.getresponse()
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        raw = bytearray()
        while part := response.read1(1 << 16):
            raw += part
            if len(raw) > ANSWER_BYTES_MAX:
                raise http.client.HTTPException("its answer does not end")
            if self._ends.over:
                raise TimeoutError
        return response.status, bytes(raw)

    def interrupt(self) -> None:
        """End `answer`, which another thread is in, as if the connection had broken."""
        opened = self._connection.sock
        if opened is not None:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _error(code: object, text: str) -> LiveWeightError:
    """Rebuild the engine's error. The text ends with the remedy, which the class adds again."""
    kind = next((kind for kind in catalogue() if kind.code == code), None)
    if kind is None:
        return WireError(text)
    return kind.retold(text.removesuffix(f"; {kind.remedy}"))


def _left_s(deadline: Deadline) -> float:
    """The engine's timeout. Positive even at the deadline, so that the engine's own error comes back."""
    return max(0.001, deadline.remaining_s())
