"""The vLLM that is tortured: a real server, in vLLM's own environment, one life after the other at one port; and clients of it."""

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
_SAID = b": weight-version "


class TorturedVllmServer:
    """One server. `newest` is the label of the last version that was published, or begun to be. Its life is the torture's thread's; asking
    is for any."""

    def __init__(
        self,
        launching: VllmLaunching,
        directory: Path,
        versions: PublishedContents,
        newest: Callable[[], int],
    ) -> None:
        self._versions, self._newest, self._since = versions, newest, 0
        self._wanted = VllmServerConfig(
            python=launching.python,
            runs=launching.runs,
            model=versions.directories[0],
            directory=directory,
            # One thread: clients, trainers and the replay need the other cores. Its sockets lie with the torture's.
            environment={**launching.environment, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
            port=free_port(),
            options=OPTIONS,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._outlived: list[int] = []
        self.family: list[Forked] = []
        """Every process that it had, in all its lives."""

    @property
    def url(self) -> str:
        """Where it serves."""
        return self._wanted.url

    @property
    def pid(self) -> int:
        """Of its first process, whose session all others are in."""
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """It serves, on the weights of its start, on return."""
        self._since = self._newest()
        self._process = launch(self._wanted)
        await_serving(self._wanted, self._process, Deadline.after(START_S))
        self.family += [Forked(pid) for pid in self.processes()]

    def end(self, first: signal.Signals = signal.SIGTERM) -> None:
        """It and all that it started has ended on return, and what outlived it."""
        self.bury()
        if self._process is not None:
            end(self._process, first)

    def behead(self) -> None:
        """Its first process has ended on return, killed; what it started does not know that, and goes on until it is buried."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._outlived.append(self._process.pid)

    def bury(self) -> None:
        """What outlived its first process is killed, too."""
        for session in self._outlived:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        self._outlived.clear()

    def processes(self) -> dict[int, str]:
        """Those that run now, by id, and what they are."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                head, _, tail = path.read_text().rpartition(")")
                if int(tail.split()[3]) == self.pid:
                    found[int(path.parent.name)] = f"vLLM's {head.partition('(')[2]}"
        return found

    def ask(self, answer: ReplayAnswer, sampling: Sampling, patience_s: float) -> Iterator[int]:
        """See LoadTarget. One that is broken off does not say what served at its end: it may have come as far as the newest."""
        connection = http.client.HTTPConnection("127.0.0.1", self._wanted.port, timeout=patience_s)
        since, said = self._since, _Said()
        try:
            connection.request("POST", "/v1/completions", *_request(answer, sampling))
            yield from said.read(connection.getresponse(), answer)
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ChannelClosed(f"{self.url} broke an answer off: {error}") from error
        finally:
            connection.close()
            if said.admitted is not None:
                newest = str(self._newest())
                answer.served = self._versions.between(said.admitted, said.finished or newest, since=since)


class _Said:
    """What one answer says of its versions."""

    admitted: str | None = None
    finished: str | None = None

    def read(self, response: http.client.HTTPResponse, answer: ReplayAnswer) -> Iterator[int]:
        """Write its tokens into the answer, as they come."""
        if response.status != 200:
            raise Unavailable(f"vLLM answered with status {response.status}")
        self.admitted = response.headers[ADMITTED.decode()]
        yield 0
        while line := response.readline():
            if line.startswith(_SAID):
                self.finished = json.loads(line.removeprefix(_SAID))["finished"]
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
