"""Faults injected into a process from outside, without its help: flipped bits in its memory, a connection that is shut down.

Both do what a debugger does: they need the right to trace the process, which its ancestors have. Signals are sent in faulted_round.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

from liveweight.errors import Unavailable
from liveweight.transports.ipc.arena import DATA_OFFSET_BYTES

_PIDFD_GETFD = 438
_ARENA = "/memfd:liveweight (deleted)"


BITS = 64


def flip(pid: int, number: int, *, spared: int) -> bool:
    """Flip bits all over one arena that the process offers to readers, except the one at `spared`. Returns whether there was one.

    Flips enough bits to hit bytes that are being read: a ring is larger than what a small model needs of it.
    """
    arenas = [(start, size) for start, size in _arenas(pid) if not start <= spared < start + size]
    if not arenas:
        return False
    start, size = arenas[number % len(arenas)]
    chance = random.Random(number)
    for _ in range(BITS):
        _flip(pid, start + chance.randrange(size), chance.randrange(8))
    return True


def _arenas(pid: int) -> list[tuple[int, int]]:
    """Address and size of the data of every arena that the process itself writes."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split(maxsplit=2)
            if line.endswith(_ARENA) and mode == "rw-s":
                start, end = (int(text, 16) for text in span.split("-"))
                if end - start > DATA_OFFSET_BYTES:
                    found.append((start + DATA_OFFSET_BYTES, end - start - DATA_OFFSET_BYTES))
    return found


def _flip(pid: int, address: int, bit: int) -> None:
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise Unavailable("writing into a trainer's memory needs the right to trace it (ptrace)") from error
    try:
        with suppress(OSError):  # the process exited, or unmapped the arena meanwhile
            old = os.pread(descriptor, 1, address)
            os.pwrite(descriptor, bytes([old[0] ^ (1 << bit)]), address)
    finally:
        os.close(descriptor)


def cut(pid: int, number: int) -> bool:
    """Shut down one connection of the process to another program, in both directions. Returns whether there was one."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        connections = [
            found for number in _sockets(pid) if (found := _connection(process, number)) is not None
        ]
    finally:
        os.close(process)
    if connections:
        with suppress(OSError):
            connections[number % len(connections)].shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    return bool(connections)


def _sockets(pid: int) -> list[int]:
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                if path.readlink().name.startswith("socket:"):
                    found.append(int(path.name))
    return sorted(found)


def _connection(process: int, number: int) -> socket.socket | None:
    """Duplicate a descriptor of another process, if it is a connection with an address. Socket pairs are internal to a program."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0)
    if descriptor < 0:
        if ctypes.get_errno() == 1:
            raise Unavailable("cutting a process's connection needs the right to trace it (ptrace)")
        return None
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:  # the number is another file by now
        os.close(descriptor)
        return None
    try:
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and (
            found.getsockname() or found.getpeername()
        ):
            return found
    except OSError:
        pass
    found.close()
    return None
