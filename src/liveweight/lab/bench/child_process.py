"""Processes of a benchmark: started with one socket, over which JSON lines go both ways."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from liveweight.errors import ChannelClosed
from liveweight.spec.deadline import Deadline


class JsonSocket:
    """One end of such a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""

    def send(self, **facts: object) -> None:
        """Send one line."""
        self._socket.sendall(json.dumps(facts).encode() + b"\n")

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """The next line."""
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], deadline.remaining_s())[0]:
                raise deadline.exceeded("a benchmark's process")
            more = self._socket.recv(1 << 16)
            if not more:
                raise ChannelClosed("a benchmark's process ended; its own error is above")
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        received: dict[str, Any] = json.loads(line)
        return received

    def receive_now(self) -> dict[str, Any] | None:
        """The next line, if one is there."""
        if b"\n" not in self._buffer and not select.select([self._socket], [], [], 0)[0]:
            return None
        return self.receive(Deadline.after(1.0))


class BenchProcess:
    """A process that runs one function of this package with its socket and a configuration. Ends with the `with`."""

    def __init__(self, main: Callable[[JsonSocket, dict[str, Any]], None], config: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        where = f"from {main.__module__} import {main.__name__} as main"
        code = f"{where}; from liveweight.lab.bench.child_process import run; run(main, {theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.line, self.pid = JsonSocket(ours), self._process.pid
        self._socket = ours
        self.line.send(**config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        if error is not None:
            self._process.kill()
        self._process.wait()


def run(main: Callable[[JsonSocket, dict[str, Any]], None], descriptor: int) -> None:
    """Run in the child: receive the configuration, then call the function."""
    with socket.socket(fileno=descriptor) as end:
        line = JsonSocket(end)
        main(line, line.receive(Deadline.after(60.0)))


def resident_bytes(field: str) -> int:
    """A memory figure of this process, by its name in /proc/self/status."""
    with open(f"/proc/{os.getpid()}/status") as file:  # noqa: PTH123 - a kernel file, not a path of ours
        for row in file:
            if row.startswith(f"{field}:"):
                return int(row.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Reset VmHWM to what is resident now."""
    with open(f"/proc/{os.getpid()}/clear_refs", "w") as file:  # noqa: PTH123
        file.write("5")
