"""The consoles of an engine's ranks: where each reports the moment it is in, and waits there when it was asked to."""

from __future__ import annotations

import socket
from pathlib import Path

from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.lab.torture.fork_server import Forked
from tests.support.processes.fork_server import Zygote
from tests.support.programs.conversation import ANSWER_S, Conversation


class RankConsoles:
    """One for every rank that was started. Closes when the ranks are gone."""

    def __init__(self, directory: Path, world: int) -> None:
        self.paths = [str(directory / f"console{rank}") for rank in range(world)]
        self._listeners = [socket.socket(socket.AF_UNIX) for _ in self.paths]
        for listener, path in zip(self._listeners, self.paths, strict=True):
            listener.bind(path)
            listener.listen()
            listener.settimeout(ANSWER_S)
        self._open: list[Conversation] = []
        self.of: dict[int, Conversation] = {}
        """The newest of each rank."""

    def accept(self, rank: int) -> int:
        """Add the console of a rank that was started; returns its process id."""
        link, _ = self._listeners[rank].accept()
        with link:
            console = Conversation(f"rank {rank}", reads=link.makefile("r"), writes=link.makefile("w"))
        self._open.append(console)
        self.of[rank] = console
        pid: int = console.expect("pid")["pid"]
        return pid

    def forking(self, zygote: Zygote) -> Launch:
        """Start ranks with consoles, by forking."""

        def launch(rank: int, end: socket.socket) -> RankProcess:
            config: dict[str, object] = {"console": self.paths[rank]}
            started = Forked(
                zygote.start("tests.support.programs.engine_rank_program", config, end.fileno(), 1)
            )
            assert self.accept(rank) == started.pid
            return started

        return launch

    def close(self) -> None:
        """Once the ranks have ended."""
        for console in self._open:
            console.close()
        for listener in self._listeners:
            listener.close()
