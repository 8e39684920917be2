"""Functions on sockets that listeners and channels share: addresses, options, single steps that never wait.

Owns no socket: the caller closes what it makes.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import zmq

from liveweight.errors import AddressUnusable, ChannelClosed, Unavailable
from liveweight.spec.deadline import Deadline
from liveweight.wire.limits import WireLimits

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

_UNIX, _TCP = "ipc://", "tcp://"
_ENCRYPTION_BYTES = 64
"""By how much a frame grows when CURVE seals it, rounded up."""
_LONGEST_POLL_S = 3600.0
_LAST_PORT = 0xFFFF
_PROBE_S = 2.0


def milliseconds(deadline: Deadline) -> int:
    """The time left, as a poll takes it: rounded up, so that a poll never spins; at most an hour."""
    return math.ceil(min(deadline.remaining_s(), _LONGEST_POLL_S) * 1000)


def unix_path(address: str) -> Path | None:
    """The path of a unix address; None for TCP. Raises AddressUnusable for anything else."""
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    if address.startswith(_TCP) and host and (port == "*" or (port.isdecimal() and int(port) <= _LAST_PORT)):
        return None
    path = address.removeprefix(_UNIX)
    if not address.startswith(_UNIX) or not path or path.startswith(("@", "*")):
        raise AddressUnusable(f"{address!r} is neither ipc://path nor tcp://host:port")
    return Path(path)


def host_towards(address: str) -> str | None:
    """The address that this host has on the way to a TCP address; None for a unix address. Sends nothing.

    Raises AddressUnusable where there is no way.
    """
    if unix_path(address) is not None:
        return None
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise AddressUnusable(f"no way from this host to {address}: {error}") from error
        return str(probe.getsockname()[0])


@contextmanager
def signals_held() -> Iterator[None]:
    """Let this thread's signals wait for a moment.

    pyzmq does not repeat all calls that a signal interrupts: a connect would fail, and a context would be forgotten
    with its threads still running. For steps that do not wait for a peer.
    """
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)


def terminate(context: Context) -> None:
    """End a context whose sockets are closed, and its threads."""
    with signals_held():
        context.term()


def make(context: Context, kind: int) -> Socket:
    """A socket of that kind. Raises Unavailable when the process has no more descriptors."""
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot make a socket: {error.strerror}") from error


def refuse_if_taken(path: Path, *, takes_over: bool = False) -> None:
    """Raise AddressUnusable if a process listens at that path, unless it is taken over, or if what lies there is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressUnusable(f"{path} exists and is no socket")
        if takes_over:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except BlockingIOError:
        pass
    except OSError as error:
        raise AddressUnusable(f"cannot listen at {path}: {error}") from error
    raise AddressUnusable(f"another process listens at {path}")


def nobody_listens(address: str, deadline: Deadline) -> bool:
    """Whether an address refuses at once: a socket file whose process was killed, a port that nobody holds."""
    path = unix_path(address)
    family = socket.AF_INET if path is None else socket.AF_UNIX
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0 if path is not None else min(_PROBE_S, deadline.remaining_s()))
        try:
            probe.connect((host, int(port)) if path is None else str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:  # busy, for instance: somebody is there, or the connect proper will say what is wrong
            return False
    return False


def still_there(path: Path, bound: os.stat_result) -> bool:
    """Whether a socket file is ours, and not one that a successor put in its place."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), bound)
    return False


def unlink_if_same(path: Path, bound: os.stat_result) -> None:
    """Remove our socket file, but no successor's."""
    if still_there(path, bound):
        path.unlink(missing_ok=True)


def configure(target: Socket, address: str, limits: WireLimits) -> None:
    """Set what both sides of a channel have in common."""
    target.linger = 0
    target.sndhwm = target.rcvhwm = limits.queue
    target.maxmsgsize = limits.message_bytes + _ENCRYPTION_BYTES
    target.handshake_ivl = math.ceil(limits.handshake_s * 1000)
    if unix_path(address) is None:
        target.heartbeat_ivl = math.ceil(limits.heartbeat_s * 1000)
        target.heartbeat_timeout = math.ceil(limits.silence_s * 1000)


def wait(deadline: Deadline, wanted: Mapping[Socket, int], *descriptors: int) -> None:
    """Wait until a socket may have what is wanted of it, or a descriptor is readable; at most until the deadline.

    May return early for no reason, so callers look and wait again. ZMQ's own poll is not used: it starts its time anew
    when a signal interrupts it, so that a profiler's timer would make it last.
    """
    poller = select.poll()
    for source, events in wanted.items():
        ready = int(
            source.getsockopt(zmq.EVENTS)
        )  # processes pending commands, so that the descriptor shows only new ones
        if ready & events:
            return
        poller.register(source.fileno(), select.POLLIN)
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(milliseconds(deadline))


def take(source: Socket, *, parts: int) -> list[bytes] | None:
    """The next message if one is there. Of a message with more parts than expected, one more is kept, as a sign."""
    try:
        taken = [source.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while source.rcvmore:
        part = source.recv(zmq.NOBLOCK)
        if len(taken) <= parts:
            taken.append(part)
    return taken


def put(target: Socket, *parts: bytes) -> bool:
    """Hand a message to the queue; False if that is full. Raises ChannelClosed if the peer is gone."""
    try:
        target.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise ChannelClosed(f"peer {parts[0].hex()} is gone") from error
        raise
    return True
