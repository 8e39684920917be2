"""Ranks of an engine that are there before it: children of its process, forked while that has no threads."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.lab.torture.fork_server import Forked
from tests.support.programs import engine_rank_program


class SpareRank:
    """A process that waits for its end of a stream, to be a rank with this configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ours, theirs = socket.socketpair()
        rank_config = {**config, "parent": os.getpid()}
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            _wait_and_run(theirs, rank_config)
        theirs.close()

    def launch(self, end: socket.socket) -> RankProcess:
        """Let it begin."""
        with self._ours:
            socket.send_fds(self._ours, [b"."], [end.fileno()])
        return Forked(self._pid)


def spare_ranks(configs: Iterable[Mapping[str, Any]]) -> Launch:
    """Fork them; starts them by rank, each once."""
    spares = [SpareRank(config) for config in configs]
    return lambda rank, end: spares[rank].launch(end)


def _wait_and_run(link: socket.socket, config: dict[str, Any]) -> None:
    code = 1
    try:
        with link:
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if descriptors:
            engine_rank_program.main(config | {"stream": descriptors[0]})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
