"""`liveweight` with its arguments, in processes that the zygote forks: seconds are saved on each."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from tests.support.engine.engines import WITHIN_S
from tests.support.processes.fork_server import EXIT, Zygote


class Command:
    """One process. Its standard output is read here; it has ended when that has."""

    def __init__(self, zygote: Zygote, config: dict[str, object], errors: IO[str]) -> None:
        """`errors` is a file that is appended to."""
        self._reads, writes = os.pipe()
        self._errors = errors
        with Path(os.devnull).open() as nothing:
            ends = (nothing.fileno(), writes, self._errors.fileno())
            self.pid = zygote.start("tests.support.programs.cli_program", config, *ends)
        os.close(writes)
        self._output, self._running = b"", True

    def first_line(self) -> str:
        """Wait for it."""
        deadline_s = time.monotonic() + WITHIN_S
        while b"\n" not in self._output and self._read(deadline_s):
            continue
        assert b"\n" in self._output, self.errors
        return self._output.decode().partition("\n")[0]

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it printed, when it has ended."""
        deadline_s = time.monotonic() + WITHIN_S
        while self._read(deadline_s):
            continue
        printed, _, code = self._output.decode().rpartition(EXIT)
        assert code, f"process {self.pid} was killed, having printed {printed} {self.errors}"
        return int(code.rstrip("}\n")), printed

    def _read(self, deadline_s: float) -> bool:
        if not select.select([self._reads], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            raise TimeoutError(f"process {self.pid} neither spoke nor ended; {self._output!r} {self.errors}")
        more = os.read(self._reads, 1 << 16)
        self._output += more
        self._running = self._running and bool(more)
        return self._running

    @property
    def errors(self) -> str:
        """What it wrote to its standard error, up to now."""
        self._errors.seek(0)
        return self._errors.read()

    def send_signal(self, number: signal.Signals) -> None:
        """While it runs."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Make sure that it is gone."""
        if self._running:
            with suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
        os.close(self._reads)


class Cli:
    """The program. Its sockets and its secret lie below `place`."""

    def __init__(self, zygote: Zygote, *, echo: bool = False) -> None:
        """`echo`: what is served is tests/support/programs/serve_program's engine."""
        self._zygote, self._echo = zygote, echo

    def run(self, place: Path, *arguments: object, **environment: str) -> CompletedProcess[str]:
        """One command, to its end."""
        with self.started(place, *arguments, **environment) as command:
            code, printed = command.ended()
            return CompletedProcess([str(argument) for argument in arguments], code, printed, command.errors)

    @contextmanager
    def started(self, place: Path, *arguments: object, **environment: str) -> Iterator[Command]:
        """One command; killed with the block, if it has not ended before."""
        config: dict[str, object] = {
            "arguments": [str(argument) for argument in arguments],
            "environ": {"TMPDIR": str(place), **environment},
            "echo": self._echo,
        }
        with tempfile.TemporaryFile("a+") as errors:
            command = Command(self._zygote, config, errors)
            try:
                yield command
            finally:
                command.close()

    @contextmanager
    def serving(
        self, place: Path, model: Path, *options: str, **environment: str
    ) -> Iterator[tuple[str, str]]:
        """`liveweight serve` on two ranks: its URL and its address. It ends well."""
        given = ("serve", model, "--tp", 2, "--port", 0, "--threads", 1, *options)
        with self.started(place, *given, **environment) as server:
            line = server.first_line()
            yield line.split()[3].rstrip(","), line.rpartition(" updates at ")[2]
            server.send_signal(signal.SIGTERM)
            code, _ = server.ended()
            assert code == 0, server.errors
