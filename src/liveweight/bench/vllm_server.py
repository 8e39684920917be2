"""A vLLM server of a benchmark, in vLLM's own environment, and clients that stream from it all the time."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liveweight.errors import Unavailable
from liveweight.integrations.vllm.controls import HttpControls
from liveweight.spec.deadline import Deadline

START_S, CALL_S = 600.0, 300.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_PLUGINS": "liveweight",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""For a CPU, without a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a server is started: vLLM's Python, the model, where its secret and its log are, and the extension of its workers."""

    python: Path
    model: Path
    directory: Path
    environment: Mapping[str, str]
    extension: str
    options: Sequence[str] = ()
    port: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that serves."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(wanted: Serving) -> Iterator[Server]:
    """A server; it ends with the block, and all that it started with it."""
    port = wanted.port or free_port()
    command = [
        *(str(wanted.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(wanted.model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", "--enforce-eager"),
        *("--max-num-seqs", "16", "--worker-extension-cls", wanted.extension),
        *("--weight-transfer-config", '{"backend": "liveweight"}', *wanted.options),
    ]
    secret = str(wanted.directory / "secret")
    environment = {**wanted.environment, **ENVIRONMENT, "LIVEWEIGHT_SECRET_FILE": secret}
    log = wanted.directory / f"vllm-{port}.log"
    with log.open("a") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield Server(url, process)
    finally:
        for ends in (signal.SIGTERM, signal.SIGKILL):  # its processes are a session of their own
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, ends)
                process.wait(20)


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline, controls = Deadline.after(START_S), HttpControls(url)
    while True:
        with suppress(Exception):
            controls.paused(Deadline.after(5.0))
            return
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.5)
            raise Unavailable(f"vLLM ended: {log.read_text()[-2000:]}")
        deadline.check(f"vLLM to serve at {url}")


def call_workers(url: str, method: str, *arguments: str, **named: str) -> None:
    """A method of every worker."""
    body = {"method": method, "args": list(arguments), "kwargs": named}
    HttpControls(url).ask("POST", "/collective_rpc", body, Deadline.after(CALL_S))


class Clients:
    """So many requests at all times; notes when each of their tokens comes."""

    def __init__(self, url: str, count: int) -> None:
        self._host = url.removeprefix("http://")
        self._over = threading.Event()
        self._times: list[list[float]] = [[] for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        prompt = [(number * 37 + position * 11) % 400 + 4 for position in range(16)]
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": 1000,
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
        """Wait until every client has had so many tokens more."""
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
    said = HttpControls(url).ask("POST", "/v1/completions", body, Deadline.after(CALL_S))
    tokens: list[Any] = said["choices"][0]["token_ids"]
    return tokens
