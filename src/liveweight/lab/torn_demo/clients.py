"""Clients of the torn demo: each sends one request after the other over HTTP, streams the answer and keeps every token.

If a paused engine ends an answer before its length, the client continues it: it sends the prompt and the answer so far again, as clients
of such systems do. So an answer always has all its tokens.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from liveweight.errors import ChannelClosed, LiveWeightError
from liveweight.spec.deadline import Deadline

ANSWER_S = 120.0
END_S = 5.0
PROMPT_TOKENS = 8
GREEDY = {"temperature": 0.0, "ignore_eos": True, "stream": True, "return_token_ids": True}


@dataclass(slots=True)
class ClientAnswer:
    """A request and its answer. `mark` is the part of the demo in which the request began."""

    client: int
    mark: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)


class ClientStream:
    """The clients of one side, for the length of the `with`. `finished` is called for every whole answer, on its client's thread."""

    def __init__(
        self, name: str, url: str, *, clients: int, tokens: int, finished: Callable[[ClientAnswer], None]
    ) -> None:
        self.name, self.streamed = name, 0
        self._at, self._tokens, self._finished = urlsplit(url), tokens, finished
        self._changed = threading.Condition()
        self._mark, self._done = 0, [0] * clients
        self._stopping = False
        self._fault: LiveWeightError | None = None
        self._open: set[http.client.HTTPConnection] = set()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]

    def begin(self, mark: int) -> None:
        """Requests that begin from now on belong to this part of the demo."""
        with self._changed:
            self._mark, self._done = mark, [0] * len(self._done)

    def until(self, answers: int, deadline: Deadline) -> None:
        """Wait until every client has received this many whole answers of this part. Raises a client's error."""
        with self._changed:
            held = self._changed.wait_for(
                lambda: self._fault is not None or min(self._done) >= answers, deadline.remaining_s()
            )
        if self._fault is not None:
            raise self._fault
        if not held:
            raise deadline.exceeded(f"{self.name} to answer {answers} requests of every client")

    def finish(self, deadline: Deadline) -> None:
        """Let every client finish its answer; no client sends requests after that."""
        self._stopping = True
        for thread in self._threads:
            thread.join(deadline.remaining_s())
            if thread.is_alive():
                raise deadline.exceeded(f"a client of {self.name} to finish")
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut off clients that still wait for an answer."""
        self._stopping = True
        with self._changed:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(END_S)

    def _run(self, client: int) -> None:
        number = 0
        try:
            while not self._stopping:
                answer = ClientAnswer(client=client, mark=self._mark, prompt=prompt(client, number))
                while len(answer.tokens) < self._tokens:
                    self._stream(answer)
                self._note(answer)
                number += 1
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with self._changed:
                if not self._stopping:
                    self._fault = ChannelClosed(
                        f"{self.name} did not answer: {type(error).__name__}: {error}"
                    )
                self._changed.notify_all()

    def _note(self, answer: ClientAnswer) -> None:
        self._finished(answer)
        with self._changed:
            if answer.mark == self._mark:
                self._done[answer.client] += 1
            self._changed.notify_all()

    def _stream(self, answer: ClientAnswer) -> None:
        """Request the rest of an answer. Returns when the engine ends it, at its length or before."""
        connection = http.client.HTTPConnection(str(self._at.hostname), self._at.port, timeout=ANSWER_S)
        with self._changed:
            self._open.add(connection)
        try:
            body = {
                "prompt": [*answer.prompt, *answer.tokens],
                "max_tokens": self._tokens - len(answer.tokens),
                **GREEDY,
            }
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            for choice in _choices(connection.getresponse()):
                answer.tokens += choice["token_ids"]
                with self._changed:
                    self.streamed += len(choice["token_ids"])
        finally:
            with self._changed:
                self._open.discard(connection)
            connection.close()


def prompt(client: int, number: int) -> list[int]:
    """A prompt, the same for both sides: token ids that all our vocabularies have."""
    return [4 + (client * 37 + number * 101 + position * 11) % 400 for position in range(PROMPT_TOKENS)]


def _choices(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. HTTPException if the answer is refused, fails, or breaks off."""
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"status {response.status}: {response.read(1000)!r}")
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            chunk = json.loads(data)
            if "error" in chunk:
                raise http.client.HTTPException(str(chunk["error"]))
            yield chunk["choices"][0]
    raise http.client.HTTPException("the stream broke off")
