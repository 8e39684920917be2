"""The client of the control routes: asks an engine by its URL what it serves and where its leader listens, and tells it what to do.

Owns URLs, the key and the telling of what came back. Rounds themselves go over the wire, not through here.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from liveweight.errors import (
    ChannelClosed,
    KeyRefused,
    LiveWeightError,
    MessageInvalid,
    WireError,
    WrongState,
    catalogue,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.decoding import from_json

ANSWER_BYTES_MAX = 64 << 20
GRACE_S = 2.0
"""How much longer than the engine its client waits: the engine's own word on a deadline is better."""

FIND_S = 10.0
"""An engine that does not say by then where its leader listens is out of reach."""

LAST_STEPS_S = 30.0
"""How much longer than its own time an update may take: votes and a commit that were begun in time are ended."""


def is_url(text: str) -> bool:
    """Whether it names an engine's HTTP interface, and not a leader."""
    return text.startswith(("http://", "https://"))


def wire_address(url: str, key: str | None, deadline: Deadline) -> str:
    """Where the leader of the engine at that URL listens. A WireError, DeadlineExceeded or WrongState if it cannot be had."""
    return leader_of(url, EngineClient(url, key).weights(deadline.within(FIND_S)))


def leader_of(url: str, weights: Mapping[str, Any]) -> str:
    """The address in what the engine at that URL said of its weights, if it can be used from here."""
    address = weights.get("address")
    if address is None:
        raise WrongState("it serves without live updates", f"an update of {url}")
    if not isinstance(address, str):
        raise MessageInvalid(f"{url} is no engine of ours: its address is no text")
    if address.startswith("ipc://") and not Path(address.removeprefix("ipc://")).exists():
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
        """What it serves, and how its rounds went."""
        answer = self._ask("GET", "/v1/weights", None, deadline)
        if not {"state", "version", "address"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what it serves")
        return answer

    def undo(self, deadline: Deadline) -> dict[str, Any]:
        """Take it back to the version before; what it serves then."""
        return self._ask("POST", "/v1/weights/undo", {"timeout_s": _left_s(deadline)}, deadline)

    def update(self, wish: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Take it to a version of its source, in that time; what came of it. `wish` are the fields of the route that are not left out."""
        deadline = Deadline.after(timeout_s + LAST_STEPS_S)
        answer = self._ask("POST", "/v1/update_weights", {**wish, "timeout_s": timeout_s}, deadline)
        if not {"version", "outcome", "results"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what came of the update")
        return answer

    def verify(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Digest what it holds now, and compare it; what came of it. `question` are the fields of the route."""
        body = {**question, "timeout_s": timeout_s}
        answer = self._ask("POST", "/v1/weights/verify", body, Deadline.after(timeout_s))
        if not {"match", "version", "digest", "mismatches"} <= answer.keys():
            raise MessageInvalid(f"{self.url} is no engine of ours: it does not say what it found")
        return answer

    def pause(self, mode: str, deadline: Deadline) -> dict[str, Any]:
        """Let it take no step; how it is then."""
        return self._ask("POST", "/v1/pause", {"mode": mode, "timeout_s": _left_s(deadline)}, deadline)

    def resume(self, deadline: Deadline) -> dict[str, Any]:
        """Let it go on."""
        return self._ask("POST", "/v1/resume", None, deadline)

    def sleep(self, tags: Sequence[str] | None, timeout_s: float) -> dict[str, Any]:
        """Let it give memory back; what is asleep then."""
        return self._ask(
            "POST", "/v1/sleep", {"tags": tags, "timeout_s": timeout_s}, Deadline.after(timeout_s)
        )

    def wakeup(self, tags: Sequence[str] | None, timeout_s: float) -> dict[str, Any]:
        """Let it take its memory again; what is still asleep then."""
        return self._ask(
            "POST", "/v1/wakeup", {"tags": tags, "timeout_s": timeout_s}, Deadline.after(timeout_s)
        )

    def _ask(self, method: str, path: str, body: object, deadline: Deadline) -> dict[str, Any]:
        try:
            status, raw = exchange(self._parts, method, path, self._key, body, deadline)
        except TimeoutError:
            raise deadline.exceeded(f"{self.url} to answer {method} {path}") from None
        except OSError as error:
            raise ChannelClosed(f"{self.url} cannot be reached: {error.strerror or error}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise MessageInvalid(
                f"{self.url} is no engine of ours: {error or type(error).__name__}"
            ) from error
        return self._told(status, raw)

    def _told(self, status: int, raw: bytes) -> dict[str, Any]:
        """The answer; the engine's own error, if it is one."""
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


def exchange(
    url: SplitResult, method: str, path: str, key: str | None, body: object, deadline: Deadline
) -> tuple[int, bytes]:
    """One request, one answer. Raises what http.client raises; TimeoutError at the deadline and a little."""
    with closing(PendingCall(url, method, path, key, body, deadline)) as asked:
        return asked.answer()


class PendingCall:
    """A request that has been sent, for whoever sends another before the answer comes. Raises as `exchange` does."""

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
        try:
            self._connection.request(
                method, url.path + path, None if body is None else msgspec.json.encode(body), headers
            )
        except BaseException:
            self.close()
            raise

    def answer(self) -> tuple[int, bytes]:
        """Wait for it: its status and its body."""
        response = self._connection.getresponse()
        raw = bytearray()
        while part := response.read1(1 << 16):
            raw += part
            if len(raw) > ANSWER_BYTES_MAX:
                raise http.client.HTTPException("its answer does not end")
            if self._ends.over:
                raise TimeoutError
        return response.status, bytes(raw)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()


def _error(code: object, text: str) -> LiveWeightError:
    """The engine's error as it raised it; its remedy, which the text ends with, is the class's."""
    kind = next((kind for kind in catalogue() if kind.code == code), None)
    if kind is None:
        return WireError(text)
    return kind.retold(text.removesuffix(f"; {kind.remedy}"))


def _left_s(deadline: Deadline) -> float:
    """What the engine may take; it is asked even at the last moment, so that its own state is told."""
    return max(0.001, deadline.remaining_s())
