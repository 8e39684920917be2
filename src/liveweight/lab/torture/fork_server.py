"""The fork server: one process that has imported everything slow, and forks ranks and trainers from there.

So that a thousand of them can be killed: a process takes milliseconds to start, not seconds. Owns the processes that it forked: they end
when the fork server does.
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
    """A process that is somebody else's child: its end is seen, its exit code is not.

    Implements engine/serving/rank_processes.Process. For any thread.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended, self._lock = False, threading.Lock()

    def poll(self) -> int | None:
        """Zero once it has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send(self, number: int) -> None:
        """A signal; nothing happens if it has ended."""
        with self._lock, suppress(ProcessLookupError):
            if not self._ended:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it."""
        self.send(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; subprocess.TimeoutExpired."""
        with self._lock:
            if self._ended:
                return 0
            # Another thread may be the first to see its end, and close the other one.
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
    """Our side. `program` is the module that serves it: `serve` with its roles. For any thread."""

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
        """Its id."""
        return self._process.pid

    def fork(self, role: str, end: socket.socket) -> Forked:
        """A process that plays this role with its end of a pipe."""
        try:
            with self._lock:
                socket.send_fds(self._socket, [role.encode()], [end.fileno()])
                said = self._socket.recv(_ROLE_BYTES)
        except OSError as error:
            raise ChannelClosed(f"the fork server is gone: {error}") from error
        if not said:
            raise ChannelClosed("the fork server has ended; its own error is above")
        return Forked(int(said))

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
    """The fork server's process: fork on request until nobody asks any more. `leave` ends a forked process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: nobody asks for an exit code
    gc.collect()
    gc.freeze()  # else the first collection of every process writes to, and so copies, all that was imported
    with socket.socket(fileno=descriptor) as requests:
        while True:
            role, ends, _, _ = socket.recv_fds(requests, _ROLE_BYTES, 1)
            if not role:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _play(roles[role.decode()], ends[0], leave)
            os.close(ends[0])
            requests.send(str(pid).encode())


def _play(role: Callable[[int], None], descriptor: int, leave: Callable[[int], None]) -> None:
    code = 1
    try:
        role(descriptor)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
