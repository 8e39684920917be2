"""The demo's engines: `liveweight serve` as processes of their own, started, killed and started again.

Owns the processes: all of them have ended when the `with` ends. A terminal's Ctrl-C does not reach them; the demo ends them. What they
leave on disk lies in the demo's own directory. `Launching.program` sees to it that they do not outlive a demo that is killed.
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
LOOK_S = 0.02
LAST_WORDS = 400


class EngineServer:
    """One replica. `url` is None while it is not there. For the trainer's thread; `url` is for any."""

    start_s = 120.0
    """How long it may take to serve."""

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
        """`elastic`: it keeps snapshots, replaces ranks that it loses, and begins from its newest snapshot when it is started again."""
        self.number, self.tp, self._elastic = number, tp, elastic
        self.address = f"ipc://{directory}/engine-{number}.sock"
        self.url: str | None = None
        self._launching, self._directory, self._model = launching, directory, model
        self._errors = directory / f"engine-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def replica(self, secret: Secret) -> Driven:
        """As a publisher drives it, at every start of it."""
        return WireReplica(self.address, secret)

    def launch(self) -> None:
        """Start the process; `await_ready` when others have been started too."""
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
        """Wait until it serves. Stopped if the demo is to end; ChannelClosed, with its last words, if it ended."""
        line = self._first_line(stop, deadline)
        if not line.startswith("serving "):
            raise ChannelClosed(f"engine {self.number} did not start: {self._last_words()}")
        self.url = line.split()[3].rstrip(",")

    def restart(self, stop: Stop, deadline: Deadline) -> None:
        """Start it again: from its newest snapshot, or else on the checkpoint of its start. The next round brings it to the fleet's
        version."""
        self.kill()
        self.launch()
        self.await_ready(stop, deadline)

    def kill(self) -> None:
        """End it at once, without a chance to clean up. Its ranks notice, and end."""
        self.url = None
        if self._process is not None:
            self._process.kill()
            self._release(Deadline.after(END_S))

    def kill_rank(self, rank: int) -> int:
        """End one of its ranks, and its process id; the engine says so, and replaces it or ends."""
        pid = self._ranks()[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def await_noticed(self, killed: int, stop: Stop, deadline: Deadline) -> None:
        """Wait until the engine knows that its rank has ended: what it answers before that may be that of ranks that are gone."""
        while not self.ended and killed in self._ranks():
            if deadline.over:
                raise deadline.exceeded(f"engine {self.number} to notice that its rank was killed")
            stop.wait(LOOK_S)

    @property
    def ended(self) -> bool:
        """Whether its process has ended."""
        return self._process is None or self._process.poll() is not None

    def ask_to_end(self) -> None:
        """Let it clean up and end."""
        self.url = None
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """It has ended, however long it takes its time."""
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
        """The first line that it prints; empty if it ended without one."""
        process, kept = self._process, b""
        if process is None or process.stdout is None:
            return ""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(stop, selectors.EVENT_READ)
            while b"\n" not in kept:
                stop.check()
                if not selector.select(deadline.remaining_s()):
                    raise DeadlineExceeded(f"engine {self.number} to serve", deadline.waited_s())
                stop.check()
                more = os.read(process.stdout.fileno(), 4096)
                if not more:
                    break
                kept += more
        return kept.decode(errors="replace").partition("\n")[0]

    def _last_words(self) -> str:
        return self._errors.read_text(errors="replace").strip()[-LAST_WORDS:] or "without a word"

    def _ranks(self) -> list[int]:
        """The process ids of its ranks, by rank: a server starts them in order, from whichever thread, and starts nothing else."""
        if self._process is None:
            return []
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return sorted(int(text) for children in threads for text in _words(children))


def _words(path: Path) -> list[str]:
    """Those of a file; none where its thread has ended meanwhile."""
    try:
        return path.read_text().split()
    except OSError:
        return []


class EngineServers:
    """All replicas, started at once. Ends with the `with`: asked first, all at once, then made to."""

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
            server.ask_to_end()
        for server in self.servers:
            server.close()
