"""The demo's engines with --engine vllm: servers in vLLM's own environment. A restarted server keeps its port.

The middleware of integrations/vllm adds the version to every answer. Rounds go through vLLM's own calls.
"""

from __future__ import annotations

from pathlib import Path

from liveweight.integrations.vllm.engine import vllm
from liveweight.integrations.vllm.server_process import (
    START_S,
    VllmLaunching,
    VllmServerConfig,
    await_serving,
    end,
    free_port,
    launch,
)
from liveweight.lab.demo.engine_servers import EngineServer
from liveweight.lab.demo.settings import Launching
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.watched_replica import Driven
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import Secret

OPTIONS = (
    *("--middleware", "liveweight.integrations.vllm.middleware.Versions", "--generation-config", "vllm"),
    *("--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "128", "--disable-log-stats"),
)


class DemoVllmServer(EngineServer):
    """One replica with one worker."""

    start_s = START_S

    def __init__(self, number: int, directory: Path, model: Path, launching: VllmLaunching) -> None:
        super().__init__(number, directory, model, Launching(program=(), environment={}), tp=1)
        self._secret_file = directory / "secret"
        self._config = VllmServerConfig(
            python=launching.python,
            runs=launching.runs,
            model=model,
            directory=directory,
            # One thread: the trainer needs the other cores. Its sockets lie in the demo's directory.
            environment={**launching.environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
            port=free_port(),
            options=OPTIONS,
        )

    def replica(self, secret: Secret) -> Driven:
        """See EngineServer."""
        return vllm(self._config.url, address=self.address).replica(secret, self._secret_file)

    def launch(self) -> None:
        """See EngineServer."""
        self._process = launch(self._config)

    def await_ready(self, stop: Stop, deadline: Deadline) -> None:
        """See EngineServer."""
        if self._process is not None:
            await_serving(self._config, self._process, deadline, stop.check)
            self.url = self._config.url

    def kill(self) -> None:
        """See EngineServer. Also ends all processes that the server started."""
        self.url = None
        self.close()

    def close(self) -> None:
        """See EngineServer."""
        process, self._process = self._process, None
        if process is not None:
            end(process)
