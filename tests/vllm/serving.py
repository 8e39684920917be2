"""A vLLM server as a process of its own, in its own environment, and clients of it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from liveweight.integrations.vllm.server_process import ENVIRONMENT, VllmServerConfig, free_port, serving
from tests.arch.source_tree import ROOT

_GIVEN = os.environ.get("LIVEWEIGHT_VLLM_PYTHON")
VLLM_PYTHON = None if _GIVEN is None else str(Path(_GIVEN).absolute())
"""None where there is no vLLM to test."""
WITHIN_S = 240.0
NAME = "model"

Answer: TypeAlias = "tuple[list[int], list[float]]"
"""Greedy tokens, and the logarithm of each one's probability."""

MIDDLEWARE = ("--middleware", "liveweight.integrations.vllm.middleware.Versions")
SMALL = ("--max-num-seqs", "16", "--worker-extension-cls", "tests.vllm.faults.Faults")
OWN_ENVIRONMENT = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    """A vLLM that serves."""

    url: str
    process: subprocess.Popen[bytes]
    secret: Path

    def answer(self, tokens: int = 12, prompt: tuple[int, ...] = (5, 6, 7, 8)) -> Answer:
        """What it generates now."""
        choice = self.post("/v1/completions", asked(tokens, prompt))["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's body; AssertionError with its text if the server refuses."""
        said = httpx.post(self.url + path, json=body, timeout=WITHIN_S)
        assert said.status_code == 200, said.text
        return said.json()

    def get(self, path: str) -> Any:
        """The answer's body."""
        return httpx.get(self.url + path, timeout=WITHIN_S).json()

    def tell_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of every worker (see faults.py)."""
        results: list[Any] = self.post("/collective_rpc", {"method": method, "args": list(arguments)})[
            "results"
        ]
        return results

    def counted(self, what: str) -> float:
        """The value of one of its counters."""
        text = httpx.get(self.url + "/metrics", timeout=WITHIN_S).text
        return sum(float(found) for found in re.findall(rf"^vllm:{what}_total{{.*}} (.*)$", text, re.M))

    def packs(self) -> bool:
        """Whether its workers pack weights away, which depends on the CPU."""
        return any(int(packs) for packs in self.tell_workers("packs"))

    def workers(self) -> list[int]:
        """The processes of its workers."""
        return [int(pid) for pid in self.tell_workers("own_pid")]


def asked(tokens: int, prompt: tuple[int, ...] = (5, 6, 7, 8)) -> dict[str, Any]:
    """A greedy completion of a prompt in tokens."""
    return {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@contextmanager
def served(
    model: Path, place: Path, *, tp: int = 1, port: int = 0, dtype: str = "auto", options: Sequence[str] = ()
) -> Iterator[Server]:
    """A server of that checkpoint, ended with the block. Its log is a file in `place`."""
    wanted = VllmServerConfig(
        python=Path(str(VLLM_PYTHON)),
        model=model,
        directory=place,
        environment=os.environ | OWN_ENVIRONMENT,
        options=(
            "--dtype",
            dtype,
            "--max-model-len",
            "256",
            "--tensor-parallel-size",
            str(tp),
            *SMALL,
            *MIDDLEWARE,
            *options,
        ),
        port=port or free_port(),
    )
    with serving(wanted) as process:
        yield Server(wanted.url, process, place / "secret")
