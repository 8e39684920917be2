"""The publisher's end of the registration process: starts it, has it register arenas, and starts it again if it has exited.

Owns the process: it has ended when `close` returns. What the process does is in registration_process.py.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass

import msgspec

from liveweight.errors import ChannelClosed, DeadlineExceeded
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.nixl.registration_process import (
    MESSAGE_BYTES,
    ArenaNotRegistered,
    ArenaRegistered,
    RegisterArena,
    UnregisterArena,
    answer_of,
)

ANSWER_S = 60.0
"""How long the registration process may take: to start NIXL, and to register an arena of any size."""
END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredArena:
    """An arena as readers reach it: the address of its header page in the registration process, and NIXL's description. `incarnation`:
    which start of the registration process it belongs to."""

    address: int
    description: bytes
    incarnation: int


class RegistrationClient:
    """For one thread at a time. The process starts with the first arena."""

    def __init__(self) -> None:
        self.incarnation = 0
        """Counts the starts of the process. Registrations of an earlier process are gone."""
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return None if self._process is None else self._process.pid

    def is_registered(self, registered: RegisteredArena) -> bool:
        """Whether the process with this registration still runs."""
        process = self._process
        return registered.incarnation == self.incarnation and process is not None and process.poll() is None

    def register(self, arena: SharedArena) -> RegisteredArena:
        """Let readers reach an arena, including its header. Starts a new registration process if the last one has exited."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        size = os.fstat(arena.descriptor).st_size
        answer = self._request(RegisterArena(size), [arena.descriptor])
        return RegisteredArena(
            address=answer.address, description=answer.description, incarnation=self.incarnation
        )

    def unregister(self, registered: RegisteredArena) -> None:
        """End the registration: readers cannot reach the arena any more."""
        if self.is_registered(registered):
            self._request(UnregisterArena(registered.address), [])

    def close(self) -> None:
        """End the process, and with it every registration. May be called twice."""
        process, end = self._process, self._end
        self._process = self._end = None
        if end is not None:
            end.close()
        if process is not None:
            process.kill()
            process.wait(END_S)

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_S)
        with theirs:
            name = f"liveweight-{secrets.token_hex(8)}"
            code = f"from liveweight.transports.nixl.registration_process import main; main({theirs.fileno()}, name={name!r})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._end, self.incarnation = ours, self.incarnation + 1

    def _request(self, order: RegisterArena | UnregisterArena, descriptors: list[int]) -> ArenaRegistered:
        if self._end is None:
            raise ChannelClosed("the registration process of this source was closed")
        try:
            socket.send_fds(self._end, [msgspec.msgpack.encode(order)], descriptors)
            answer = answer_of(self._end.recv(MESSAGE_BYTES))
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded("the registration process to register memory", ANSWER_S) from error
        except OSError as error:
            raise ChannelClosed(f"the registration process of this source is gone: {error}") from error
        match answer:
            case ArenaRegistered():
                return answer
            case ArenaNotRegistered(fault=fault):
                raise fault.to_error()
