"""The zygote: one process that has imported everything slow, and forks the test programs from there.

Real processes, a second saved on each. A request is a JSON line with two descriptors: the program's standard input and output.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from tests.support.two_hosts import enter

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    "tests.support.rank_program",
    "tests.support.trainer_program",
    "tests.support.trainer_rank_program",
    "tests.support.source_program",
    "tests.support.engine_rank_program",
    "tests.support.counting_rank_program",
    "tests.support.engine_program",
    "tests.support.snapshot_program",
)
REQUEST_BYTES = 1 << 16


class Zygote:
    """The test session's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **threads, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours

    def start(self, module: str, config: dict[str, object], stdin: int, stdout: int) -> int:
        """Fork a program; its process id."""
        request = json.dumps({"module": module, "config": config}).encode()
        socket.send_fds(self._socket, [request], [stdin, stdout])
        return int(self._socket.recv(REQUEST_BYTES))

    def close(self) -> None:
        """End the zygote; programs that still run are their tests' matter."""
        self._socket.close()
        self._process.wait()


def main() -> None:
    """The zygote itself: fork on request until the test session is gone."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    modules = {name: importlib.import_module(name) for name in PROGRAMS}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: nobody asks for an exit code
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 2)
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
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if "host" in config:
            enter(str(config["host"]))
        program(config)  # type: ignore[operator]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.write(json.dumps({"exit": code}) + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
