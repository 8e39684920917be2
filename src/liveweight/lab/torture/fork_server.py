"""The fork server: one process that has imported everything slow, and forks ranks and trainers.

With it a process starts in milliseconds, not seconds, so that a run can kill a thousand of them. Owns the processes that it forked: they
end when the fork server does.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from liveweight.errors import ChannelClosed

END_S = 10.0
_ROLE_BYTES = 256


class Forked:
    """A process that is the fork server's child: its exit is visible here, its exit code is not.

    Implements engine/serving/rank_processes.RankProcess. For any thread.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended, self._lock = False, threading.Lock()

    def poll(self) -> int | None:
        """Zero once the process has exited; None before."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: int) -> None:
        """Send a signal. Does nothing if the process has exited."""
        with self._lock, suppress(ProcessLookupError):
            if not self._ended:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has exited. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self._ended:
                return 0
            # Another thread may see the exit first, and close the original descriptor.
            waited = os.dup(self._pidfd)
        try:
            if not select.select([waited], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        finally:
            os.close(waited)
        with self._lock:
            if not self._ended:
                self._ended = True
                os.close(self._pidfd)
        return 0


class ForkServer:
    """The client of a fork server. `program` is the module that runs it: it calls `serve` with its roles. For any thread."""

    def __init__(self, program: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        self._socket, self._lock = ours, threading.Lock()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self, role: str, end: socket.socket) -> Forked:
        """Fork a process that runs this role with its end of a socket pair."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [role.encode()], [end.fileno()])
                reply = self._socket.recv(_ROLE_BYTES)
        except OSError as error:
            raise ChannelClosed(f"the fork server is gone: {error}") from error
        if not reply:
            raise ChannelClosed("the fork server has ended; its own error is above")
        return Forked(int(reply))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int, roles: Mapping[str, Callable[[int], None]], leave: Callable[[int], None]) -> None:
    """Run in the fork server's process: fork on request until the client closes the socket. `leave` exits a forked process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: nobody needs an exit code
    gc.collect()
    gc.freeze()  # otherwise the first collection in every process would write to, and so copy, all imported pages
    with socket.socket(fileno=descriptor) as requests:
        while True:
            role, ends, _, _ = socket.recv_fds(requests, _ROLE_BYTES, 1)
            if not role:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _run_role(roles[role.decode()], ends[0], leave)
            os.close(ends[0])
            requests.send(str(pid).encode())


def _run_role(role: Callable[[int], None], descriptor: int, leave: Callable[[int], None]) -> None:
    code = 1
    try:
        role(descriptor)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
