"""The zygote: one process that has imported everything slow, and forks the test programs from there.

Real processes, seconds saved on each. A request is a JSON line with descriptors: the program's standard streams, and those that
it is to have under the numbers that its configuration says.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.arch.source_tree import ROOT
from tests.support.processes.two_hosts import enter

PROGRAMS = (
    "tests.support.programs.rank_program",
    "tests.support.programs.trainer_program",
    "tests.support.programs.trainer_rank_program",
    "tests.support.programs.source_program",
    "tests.support.programs.engine_rank_program",
    "tests.support.programs.counting_rank_program",
    "tests.support.programs.engine_program",
    "tests.support.programs.snapshot_program",
    "tests.support.programs.cli_program",
    "tests.support.programs.code_program",
)
REQUEST_BYTES = 1 << 16
STREAMS, DESCRIPTORS = 3, 4
EXIT = '{"exit": '
"""How the last line of a program begins that was not killed."""


class Zygote:
    """The test session's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.processes.fork_server", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **threads, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours

    def start(self, module: str, config: dict[str, object], *descriptors: int) -> int:
        """Fork a program with these standard streams, two or three, and others after the third; its process id."""
        request = json.dumps({"module": module, "config": config}).encode()
        socket.send_fds(self._socket, [request], descriptors)
        return int(self._socket.recv(REQUEST_BYTES))

    def run_code(self, code: str, descriptor: int, *, ranks: int = 0, apart: bool = False) -> int:
        """Fork `python -c`, which has one more descriptor, under its number here; its process id. See code_program."""
        config: dict[str, object] = {
            "code": code,
            "descriptors": [descriptor],
            "ranks": ranks,
            "apart": apart,
        }
        with Path(os.devnull).open() as nothing:
            return self.start(
                "tests.support.programs.code_program", config, nothing.fileno(), 1, 2, descriptor
            )

    def close(self) -> None:
        """End the zygote; programs that still run are their tests' matter."""
        self._socket.close()
        self._process.wait()


def main() -> None:
    """The zygote itself: fork on request until the test session is gone."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    modules = {name: importlib.import_module(name) for name in PROGRAMS}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: nobody asks for an exit code
    gc.collect()
    gc.freeze()  # else the first collection of every program writes to, and so copies, all that was imported
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, DESCRIPTORS)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(modules[request["module"]].main, request["config"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _run(program: object, config: dict[str, object], descriptors: list[int]) -> None:
    code = 1
    try:
        _take(descriptors[:STREAMS], range(STREAMS))
        _take(descriptors[STREAMS:], config.get("descriptors", ()))  # type: ignore[arg-type]
        if "host" in config:
            enter(str(config["host"]))
        program(config)  # type: ignore[operator]
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.write(f"{EXIT}{code}}}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take(descriptors: Sequence[int], numbers: Iterable[int]) -> None:
    for descriptor, number in zip(descriptors, numbers, strict=False):
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)


if __name__ == "__main__":
    main()
