"""Clients of the benchmarked vLLM server: calls of its workers, and clients that stream from it all the time."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from typing import Any

from liveweight.integrations.vllm.client.http_controls import HttpControls
from liveweight.spec.deadline import Deadline

CALL_S = 300.0


def call_workers(url: str, method: str, *arguments: str, **named: str) -> None:
    """Call a method of every worker."""
    body = {"method": method, "args": list(arguments), "kwargs": named}
    HttpControls(url).call("POST", "/collective_rpc", body, Deadline.after(CALL_S))


class Clients:
    """A constant number of requests, with answers of `tokens` tokens; records when each token arrives."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self._host, self._tokens = url.removeprefix("http://"), tokens
        self._over = threading.Event()
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        prompt = [(number * 37 + position * 11) % 400 + 4 for position in range(2)]
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        while not self._over.is_set():
            connection = http.client.HTTPConnection(self._host, timeout=CALL_S)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            while not self._over.is_set() and (line := response.readline()):
                if line.startswith(b"data: {"):
                    self._times[number].append(time.monotonic())
            connection.close()

    def flowing(self, tokens: int) -> None:
        """Wait until every client has received this many more tokens."""
        wanted, deadline = [len(row) + tokens for row in self._times], Deadline.after(CALL_S)
        while any(len(row) < most for row, most in zip(self._times, wanted, strict=True)):
            self._over.wait(0.01)
            deadline.check("tokens of vLLM")

    def longest_gap_s(self, began_s: float, ended_s: float) -> float:
        """Between two tokens of one client, of gaps that touch this time."""
        pairs = (pair for row in self._times for pair in itertools.pairwise(row))
        return max((b - a for a, b in pairs if b >= began_s and a <= ended_s), default=0.0)

    def usual_gap_s(self, began_s: float, ended_s: float) -> float:
        """Between two tokens of one client, the median outside of this time."""
        pairs = (pair for row in self._times for pair in itertools.pairwise(row))
        gaps = sorted(b - a for a, b in pairs if b < began_s or a > ended_s)
        return gaps[len(gaps) // 2] if gaps else 0.0

    def close(self) -> None:
        """End them."""
        self._over.set()
        for thread in self._threads:
            thread.join(CALL_S)


def answer(url: str) -> list[Any]:
    """Greedy tokens, to tell versions apart."""
    body = {
        "model": "model",
        "prompt": [5, 6, 7, 8],
        "max_tokens": 4,
        "temperature": 0,
        "return_token_ids": True,
    }
    body_of_answer = HttpControls(url).call("POST", "/v1/completions", body, Deadline.after(CALL_S))
    tokens: list[Any] = body_of_answer["choices"][0]["token_ids"]
    return tokens
