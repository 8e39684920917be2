"""A vLLM server as a process of its own, in vLLM's environment: for whoever needs one beside himself, on a CPU, without a network.

Owns the process, from its start until it and all that it started have ended.
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
_LOOK_S, _END_S, _ASK_S = 0.5, 20.0, 5.0
_LAST_WORDS = 2000
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
    """How a vLLM is started: the Python of its environment, how that runs a module, and the environment that it gets."""

    python: Path
    runs: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerConfig:
    """How a server is started: vLLM's Python and how it runs a module, the model, where its secret and its log are, its port."""

    python: Path
    model: Path
    directory: Path
    environment: Mapping[str, str]
    port: int
    runs: Sequence[str] = ("-m",)
    options: Sequence[str] = ()

    @property
    def url(self) -> str:
        """Where it will serve."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What it says, of all its lives."""
        return self.directory / f"vllm-{self.port}.log"


def launch(wanted: VllmServerConfig) -> subprocess.Popen[bytes]:
    """Start it; its processes are a session of their own. `await_serving` when others have been started, too."""
    command = [
        *(str(wanted.python), *wanted.runs, MODULE, "--model", str(wanted.model)),
        *("--host", "127.0.0.1", "--port", str(wanted.port), "--served-model-name", "model"),
        *("--enforce-eager", "--weight-transfer-config", '{"backend": "liveweight"}', *wanted.options),
    ]
    secret = str(wanted.directory / "secret")
    environment = {**wanted.environment, **ENVIRONMENT, "LIVEWEIGHT_SECRET_FILE": secret}
    with wanted.log.open("a") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def await_serving(
    wanted: VllmServerConfig,
    process: subprocess.Popen[bytes],
    deadline: Deadline,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until it serves; `look` is called now and then, and may raise. Unavailable, with its last words, if it ended."""
    controls = HttpControls(wanted.url)
    while True:
        look()
        with suppress(LiveWeightError):
            controls.paused(Deadline.after(_ASK_S))
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
            raise Unavailable(f"vLLM ended: {wanted.log.read_text(errors='replace')[-_LAST_WORDS:]}")
        deadline.check(f"vLLM to serve at {wanted.url}")


def end(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """End it and all that it started: asked first, then made to."""
    for ends in (first, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, ends)
            process.wait(_END_S)


@contextmanager
def serving(wanted: VllmServerConfig) -> Iterator[subprocess.Popen[bytes]]:
    """A server that serves; it ends with the block, and all that it started with it."""
    process = launch(wanted)
    try:
        await_serving(wanted, process, Deadline.after(START_S))
        yield process
    finally:
        end(process)


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
