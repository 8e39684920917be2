"""The vLLM server that is tortured, in vLLM's own environment, restarted at the same port; and its clients."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from liveweight.engine.serving.requests import Sampling
from liveweight.errors import ChannelClosed, Unavailable
from liveweight.integrations.vllm.middleware import ADMITTED
from liveweight.integrations.vllm.server_process import (
    START_S,
    VllmLaunching,
    VllmServerConfig,
    await_serving,
    end,
    free_port,
    launch,
)
from liveweight.lab.torture.fork_server import Forked
from liveweight.lab.torture.replay import PublishedContents, ReplayAnswer
from liveweight.spec.deadline import Deadline

OPTIONS = (
    *("--middleware", "liveweight.integrations.vllm.middleware.Versions", "--generation-config", "vllm"),
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--disable-log-stats"),
)
_VERSION_COMMENT = b": weight-version "


class TorturedVllmServer:
    """One server. `newest` returns the label of the last version whose publishing began. For the torture's thread; `stream` is for any
    thread."""

    def __init__(
        self,
        launching: VllmLaunching,
        directory: Path,
        versions: PublishedContents,
        newest: Callable[[], int],
    ) -> None:
        self._versions, self._newest, self._since = versions, newest, 0
        self._config = VllmServerConfig(
            python=launching.python,
            runs=launching.runs,
            model=versions.directories[0],
            directory=directory,
            # One thread: clients, trainers and the replay need the other cores. Its sockets lie in the torture's directory.
            environment={**launching.environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
            port=free_port(),
            options=OPTIONS,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._orphaned_sessions: list[int] = []
        self.all_processes: list[Forked] = []
        """Every process that the server ever started."""

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._config.url

    @property
    def pid(self) -> int:
        """The id of its first process, whose session all others belong to."""
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, and wait until it serves its first weights."""
        self._since = self._newest()
        self._process = launch(self._config)
        await_serving(self._config, self._process, Deadline.after(START_S))
        self.all_processes += [Forked(pid) for pid in self.processes()]

    def end(self, first: signal.Signals = signal.SIGTERM) -> None:
        """End the server, all its children, and orphans of earlier servers."""
        self.kill_orphans()
        if self._process is not None:
            end(self._process, first)

    def kill_first_process(self) -> None:
        """Kill its first process alone. Its children do not notice, and run on until `kill_orphans`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._orphaned_sessions.append(self._process.pid)

    def kill_orphans(self) -> None:
        """Kill the processes that outlived their server's first process."""
        for session in self._orphaned_sessions:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        self._orphaned_sessions.clear()

    def processes(self) -> dict[int, str]:
        """The names of the running processes, by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                head, _, tail = path.read_text().rpartition(")")
                if int(tail.split()[3]) == self.pid:
                    found[int(path.parent.name)] = f"vLLM's {head.partition('(')[2]}"
        return found

    def stream(self, answer: ReplayAnswer, sampling: Sampling, patience_s: float) -> Iterator[int]:
        """See LoadTarget. A broken answer does not report the version at its end, which may be as new as the newest."""
        connection = http.client.HTTPConnection("127.0.0.1", self._config.port, timeout=patience_s)
        since, reader = self._since, _AnswerReader()
        try:
            connection.request("POST", "/v1/completions", *_request(answer, sampling))
            yield from reader.read(connection.getresponse(), answer)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChannelClosed(f"{self.url} broke an answer off: {error}") from error
        finally:
            connection.close()
            if reader.admitted is not None:
                newest = str(self._newest())
                answer.served = self._versions.between(
                    reader.admitted, reader.finished or newest, since=since
                )


class _AnswerReader:
    """Reads one answer, and the versions that it reports."""

    admitted: str | None = None
    finished: str | None = None

    def read(self, response: http.client.HTTPResponse, answer: ReplayAnswer) -> Iterator[int]:
        """Append its tokens to the answer, as they arrive."""
        if response.status != 200:
            raise Unavailable(f"vLLM answered with status {response.status}")
        self.admitted = response.headers[ADMITTED.decode()]
        yield 0
        while line := response.readline():
            if line.startswith(_VERSION_COMMENT):
                self.finished = json.loads(line.removeprefix(_VERSION_COMMENT))["finished"]
            elif line.startswith(b"data: {"):
                tokens = _tokens(json.loads(line.removeprefix(b"data: ")))
                answer.tokens += tokens
                yield len(tokens)
        if self.finished is None:
            raise ChannelClosed("an answer of vLLM ended before its end")


def _request(answer: ReplayAnswer, sampling: Sampling) -> tuple[str, dict[str, str]]:
    body = {
        "model": "model",
        "prompt": answer.prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
        "stream": True,
    }
    return json.dumps(body), {"Content-Type": "application/json"}


def _tokens(piece: dict[str, list[dict[str, list[int] | None]]]) -> list[int]:
    if "choices" not in piece:
        raise Unavailable(f"vLLM failed: {json.dumps(piece)[:200]}")
    return [token for choice in piece["choices"] for token in choice.get("token_ids") or ()]
