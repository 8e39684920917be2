"""Engines that replace their ranks, what is done to them, and clients that go on asking whatever happens."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from liveweight.engine.recovery.restarting_engine import RestartingEngine
from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.errors import LiveWeightError
from liveweight.lab.torture.fork_server import Forked
from liveweight.spec.manifest import Version
from tests.support.engine.engines import WITHIN_S, Answer, ask, greedy
from tests.support.processes.fork_server import Zygote
from tests.support.processes.real_servers import until


class Gate:
    """Holds rank 1 in the middle of the snapshot that it writes next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        os.mkfifo(directory / "reached")
        os.mkfifo(directory / "go")
        self._reached = os.open(directory / "reached", os.O_RDONLY | os.O_NONBLOCK)
        self._go = os.open(directory / "go", os.O_RDWR)

    def shut(self) -> None:
        """Hold the next one."""
        (self.directory / "shut").touch()

    def reached(self) -> None:
        """Wait until the rank is held."""
        assert select.select([self._reached], [], [], WITHIN_S)[0]
        os.read(self._reached, 1)

    def open(self) -> None:
        """Let it go on."""
        os.write(self._go, b"1")

    def close(self) -> None:
        """Hold nobody any more."""
        for descriptor in (self._reached, self._go):
            os.close(descriptor)


def launching(zygote: Zygote, gate: Gate | None, started: Callable[[int, RankProcess], None]) -> Launch:
    """Start ranks by forking; `started` is called with each and its rank, as soon as it runs."""

    def launch(rank: int, end: socket.socket) -> RankProcess:
        config: dict[str, object] = {} if gate is None or rank == 0 else {"gate": str(gate.directory)}
        process = Forked(zygote.start("tests.support.programs.engine_rank_program", config, end.fileno(), 1))
        started(rank, process)
        return process

    return launch


def kill(engine: RestartingEngine, rank: int) -> None:
    """End one of its ranks."""
    os.kill(engine.pids[rank], signal.SIGKILL)


def recovered(engine: RestartingEngine, restarts: int) -> None:
    """Wait until it serves again, after so many restarts in all."""

    def holds() -> bool:
        found = engine.update_status().recovery
        return found is not None and found.restarts >= restarts and engine.status().state == "running"

    until(holds, f"an engine that serves after {restarts} restarts")


def saved(engine: RestartingEngine, version: Version) -> None:
    """Wait until that version is complete in a snapshot."""

    def holds() -> bool:
        snapshots = engine.update_status().snapshots
        return snapshots is not None and snapshots.newest == version and snapshots.writing is None

    until(holds, f"a snapshot of {version}")


class Load:
    """Threads that ask one request after the other, also while the engine refuses them; every answer is kept."""

    def __init__(self, engine: RestartingEngine, count: int = 3, tokens: int = 40) -> None:
        self.engine, self._tokens, self._stop = engine, tokens, threading.Event()
        self.answers: list[tuple[list[int], Answer]] = []
        self.began = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            prompt = [4 + number, 20 + turn % 50, 30, 31 + number]
            try:
                answer = ask(self.engine, prompt, greedy(self._tokens))
            except LiveWeightError:
                self._stop.wait(0.02)
                continue
            self.answers.append((prompt, answer))
            answer.piece()
            self.began.release()
            answer.wait()
            turn += 1

    def in_flight(self) -> None:
        """Wait until another request has begun to be answered."""
        while self.began.acquire(blocking=False):
            continue
        assert self.began.acquire(timeout=WITHIN_S)

    def ended(self) -> tuple[list[tuple[list[int], Answer]], list[LiveWeightError]]:
        """The answers that came to their end, and what the others failed with."""
        whole, failed = [], []
        for prompt, answer in self.answers:
            assert answer.last is not None
            if answer.last.fault is None:
                whole.append((prompt, answer))
            else:
                failed.append(answer.last.fault)
        return whole, failed


@contextmanager
def load(engine: RestartingEngine) -> Iterator[Load]:
    """Requests that go on all the time."""
    asking = Load(engine)
    for thread in asking._threads:
        thread.start()
    try:
        yield asking
    finally:
        asking._stop.set()
        for thread in asking._threads:
            thread.join(WITHIN_S)
