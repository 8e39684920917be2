"""A vLLM server as a child process, in vLLM's own environment, on a CPU, without a network. For demo, bench, torture and tests.

Owns the process, from its start until it and all its children have exited.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from liveweight.errors import LiveWeightError, Unavailable
from liveweight.integrations.vllm.client.http_controls import HttpControls
from liveweight.spec.deadline import Deadline

START_S = 600.0
_POLL_S, _END_S, _ANSWER_S = 0.5, 20.0, 5.0
_LOG_TAIL = 2000
MODULE = "vllm.entrypoints.openai.api_server"
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
class VllmLaunching:
    """How to start a vLLM: the Python of its environment, the arguments by which that runs a module, and the environment variables."""

    python: Path
    runs: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerConfig:
    """One server: vLLM's Python and how it runs a module, the model, the directory of its secret and log, its port."""

    python: Path
    model: Path
    directory: Path
    environment: Mapping[str, str]
    port: int
    runs: Sequence[str] = ("-m",)
    options: Sequence[str] = ()

    @property
    def url(self) -> str:
        """The URL at which the server will serve."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """Its log file; a restarted server appends to it."""
        return self.directory / f"vllm-{self.port}.log"


def launch(config: VllmServerConfig) -> subprocess.Popen[bytes]:
    """Start the server in a process session of its own. Does not wait: call `await_serving` once all servers are started."""
    command = [
        *(str(config.python), *config.runs, MODULE, "--model", str(config.model)),
        *("--host", "127.0.0.1", "--port", str(config.port), "--served-model-name", "model"),
        *("--enforce-eager", "--weight-transfer-config", '{"backend": "liveweight"}', *config.options),
    ]
    secret = str(config.directory / "secret")
    environment = {**config.environment, **ENVIRONMENT, "LIVEWEIGHT_SECRET_FILE": secret}
    with config.log.open("a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def await_serving(
    config: VllmServerConfig,
    process: subprocess.Popen[bytes],
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the server serves. Calls `check` at every poll; it may raise. Unavailable, with the log's end, if the server exited."""
    controls = HttpControls(config.url)
    while True:
        check()
        with suppress(LiveWeightError):
            controls.paused(Deadline.after(_ANSWER_S))
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            raise Unavailable(f"vLLM ended: {config.log.read_text(errors='replace')[-_LOG_TAIL:]}")
        deadline.check(f"vLLM to serve at {config.url}")


def end(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """End the server and all its children: first by `first`, then by SIGKILL."""
    for ends in (first, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, ends)
            process.wait(_END_S)


@contextmanager
def serving(config: VllmServerConfig) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of the block."""
    process = launch(config)
    try:
        await_serving(config, process, Deadline.after(START_S))
        yield process
    finally:
        end(process)


def free_port() -> int:
    """A free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
