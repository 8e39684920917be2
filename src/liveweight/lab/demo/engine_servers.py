"""The demo's engines: `liveweight serve` as child processes, started, killed and restarted.

Owns the processes: all of them have exited when the `with` ends. A terminal's Ctrl-C does not reach them; the demo ends them. Their files
lie in the demo's own directory. `Launching.program` makes sure that they do not outlive a demo that is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from liveweight.errors import ChannelClosed, DeadlineExceeded
from liveweight.lab.demo.settings import Launching
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.watched_replica import Driven
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import Secret

END_S = 10.0
POLL_S = 0.02
LOG_TAIL = 400


class EngineServer:
    """One replica. `url` is None while the server is not running. For the trainer's thread; `url` is for any."""

    start_s = 120.0
    """How long the server may take to serve."""

    def __init__(
        self,
        number: int,
        directory: Path,
        model: Path,
        launching: Launching,
        *,
        tp: int,
        elastic: bool = False,
    ) -> None:
        """`elastic`: the engine saves snapshots, replaces lost ranks, and starts from its newest snapshot after a restart."""
        self.number, self.tp, self._elastic = number, tp, elastic
        self.address = f"ipc://{directory}/engine-{number}.sock"
        self.url: str | None = None
        self._launching, self._directory, self._model = launching, directory, model
        self._errors = directory / f"engine-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def replica(self, secret: Secret) -> Driven:
        """The replica that a publisher drives. Stays valid when the server is restarted."""
        return WireReplica(self.address, secret)

    def launch(self) -> None:
        """Start the process. Does not wait: call `await_ready` once all servers are started."""
        arguments = {
            "--tp": str(self.tp),
            "--port": "0",
            "--weights-address": self.address,
            "--secret-file": str(self._directory / "secret"),
            "--kv-mb": "64",
            "--max-running": "128",
            "--batch-tokens": "1024",
            "--grace": "0",
        }
        given = [text for pair in arguments.items() for text in pair]
        if self._elastic:
            snapshots = self._directory / f"snapshots-{self.number}"
            given += ["--snapshots", str(snapshots), "--restart-ranks", "--resume"]
        environment = {**self._launching.environment, "TMPDIR": str(self._directory)}
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [*self._launching.program, str(self._model), *given],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def await_ready(self, stop: Stop, deadline: Deadline) -> None:
        """Wait until it serves. RunStopped if the demo is to end; ChannelClosed, with the end of its log, if the server exited."""
        line = self._first_line(stop, deadline)
        if not line.startswith("serving "):
            raise ChannelClosed(f"engine {self.number} did not start: {self._log_tail()}")
        self.url = line.split()[3].rstrip(",")

    def restart(self, stop: Stop, deadline: Deadline) -> None:
        """Restart it from its newest snapshot, or else from the checkpoint it was first started with. The next round brings it to the
        fleet's version."""
        self.kill()
        self.launch()
        self.await_ready(stop, deadline)

    def kill(self) -> None:
        """Send SIGKILL: the server cannot clean up. Its ranks notice, and exit."""
        self.url = None
        if self._process is not None:
            self._process.kill()
            self._release(Deadline.after(END_S))

    def kill_rank(self, rank: int) -> int:
        """Kill one of its ranks, and return its process id. The engine reports that, and replaces the rank or exits."""
        pid = self._ranks()[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def await_noticed(self, killed: int, stop: Stop, deadline: Deadline) -> None:
        """Wait until the engine knows that its rank has exited. Answers before that may come from lost ranks."""
        while not self.ended and killed in self._ranks():
            if deadline.over:
                raise deadline.exceeded(f"engine {self.number} to notice that its rank was killed")
            stop.wait(POLL_S)

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._process is None or self._process.poll() is not None

    def terminate(self) -> None:
        """Send SIGTERM: the server cleans up and exits."""
        self.url = None
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """Wait until the process has exited; kill it after END_S."""
        if self._process is None:
            return
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._release(Deadline.after(END_S))

    def _release(self, deadline: Deadline) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdout is not None:
            process.stdout.close()
        try:
            process.wait(deadline.remaining_s())
        except subprocess.TimeoutExpired:
            raise deadline.exceeded(f"engine {self.number}, which was killed, to end") from None

    def _first_line(self, stop: Stop, deadline: Deadline) -> str:
        """The first line that the server prints; empty if it exited without one."""
        process, output = self._process, b""
        if process is None or process.stdout is None:
            return ""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(stop, selectors.EVENT_READ)
            while b"\n" not in output:
                stop.check()
                if not selector.select(deadline.remaining_s()):
                    raise DeadlineExceeded(f"engine {self.number} to serve", deadline.waited_s())
                stop.check()
                more = os.read(process.stdout.fileno(), 4096)
                if not more:
                    break
                output += more
        return output.decode(errors="replace").partition("\n")[0]

    def _log_tail(self) -> str:
        return self._errors.read_text(errors="replace").strip()[-LOG_TAIL:] or "its log is empty"

    def _ranks(self) -> list[int]:
        """The process ids of its ranks, by rank: a server starts them in order, from any thread, and starts nothing else."""
        if self._process is None:
            return []
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return sorted(int(text) for children in threads for text in _read_words(children))


def _read_words(path: Path) -> list[str]:
    """The words of a /proc file; none if its thread has ended meanwhile."""
    try:
        return path.read_text().split()
    except OSError:
        return []


class EngineServers:
    """All replicas, started at once. They end with the `with`: all get SIGTERM at once, then SIGKILL."""

    def __init__(self, servers: Sequence[EngineServer]) -> None:
        self.servers = tuple(servers)

    def launch(self) -> None:
        """Start all of them."""
        for server in self.servers:
            server.launch()

    def await_ready(self, stop: Stop) -> None:
        """Wait until all of them serve."""
        deadline = Deadline.after(max(server.start_s for server in self.servers))
        for server in self.servers:
            server.await_ready(stop, deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.close()
