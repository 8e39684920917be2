"""Descriptors: hand open files to another process of the same user on the same host.

Owns a unix socket beside the channels, which cannot carry descriptors. Whoever asks must be the same user, prove the
secret and name the token under which descriptors were registered. What the files hold is for transports/.

After the proof (descriptor_proof):

    client  u8 length, token
    server  u16 count, and the descriptors with it     or count 0: nothing is registered under that token
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from liveweight.errors import AddressUnusable, ChannelClosed, MessageInvalid, WrongSecret, WrongState
from liveweight.spec.deadline import Deadline
from liveweight.wire import descriptor_proof
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.sockets import milliseconds

TOKEN_BYTES_MAX = 64
COUNT = struct.Struct("<H")
_CREDENTIALS = struct.Struct("3i")
_PAUSE_S = 0.01

Result = TypeVar("Result")


def fetch(
    path: Path, secret: Secret, token: bytes, deadline: Deadline, limits: WireLimits | None = None
) -> list[int]:
    """The descriptors registered under the token at that socket, now the caller's to close; all close on exec.

    Raises ChannelClosed when nobody serves there or it ends, WrongSecret when either side does not hold the secret,
    WrongState when nothing is registered under the token. No descriptor is left open on failure.
    """
    check_token(token)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        talk = _Talk(connection, path, deadline)
        talk.connect()
        _prove(talk, secret)
        talk.send(bytes((len(token),)) + token)
        fetched = talk.descriptors((limits or WireLimits()).descriptors)
    if not fetched:
        raise WrongState(f"{path} has nothing under token {token.hex()}", "fetch")
    return fetched


def check_token(token: bytes) -> None:
    """Raise MessageInvalid unless it can be a token."""
    if not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise MessageInvalid(f"a token has 1 to {TOKEN_BYTES_MAX} bytes, not {len(token)}")


def peer_user(connection: socket.socket) -> int:
    """The user who runs the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def close_all(descriptors: list[int]) -> None:
    """Close each of them and forget them."""
    while descriptors:
        os.close(descriptors.pop())


def _prove(talk: _Talk, secret: Secret) -> None:
    greeting = talk.read(len(descriptor_proof.MAGIC) + descriptor_proof.NONCE_BYTES)
    magic, theirs = greeting[: len(descriptor_proof.MAGIC)], greeting[len(descriptor_proof.MAGIC) :]
    if magic != descriptor_proof.MAGIC:
        raise MessageInvalid(f"{talk.path} is no descriptor socket of ours")
    ours = descriptor_proof.nonce()
    talk.send(ours + descriptor_proof.of_client(secret, theirs, ours))
    if talk.read(1) != descriptor_proof.ADMITTED:
        raise WrongSecret(f"{talk.path}: the server does not accept our secret")
    if not descriptor_proof.equal(
        talk.read(descriptor_proof.MAC_BYTES), descriptor_proof.of_server(secret, theirs, ours)
    ):
        raise WrongSecret(f"{talk.path}: the server does not hold our secret")


class _Talk:
    """A client's side of the socket: every step waits at most until the deadline, and raises our errors."""

    def __init__(self, connection: socket.socket, path: Path, deadline: Deadline) -> None:
        self.path = path
        self._connection = connection
        self._deadline = deadline

    def connect(self) -> None:
        self._connection.setblocking(False)
        while not self._connected():
            self._deadline.check(f"{self.path} to accept")
            select.poll().poll(milliseconds(self._deadline.within(_PAUSE_S)))
        if peer_user(self._connection) != os.geteuid():
            raise WrongSecret(f"{self.path} is served by another user")

    def _connected(self) -> bool:
        try:
            self._connection.connect(str(self.path))
        except BlockingIOError:  # its queue of connections is full
            return False
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ChannelClosed(f"nobody serves descriptors at {self.path}") from error
        except OSError as error:
            raise AddressUnusable(f"cannot connect to {self.path}: {error}") from error
        return True

    def send(self, data: bytes) -> None:
        self._step(partial(self._connection.sendall, data))

    def read(self, size: int) -> bytes:
        data = b""
        while (missing := size - len(data)) > 0:
            data += self._some(self._step(partial(self._connection.recv, missing)))
        return data

    def descriptors(self, most: int) -> list[int]:
        """As many as were announced and at most so many; none is left open on failure."""
        found: list[int] = []
        try:
            data = b""
            while len(data) < COUNT.size:
                data += self._piece(COUNT.size - len(data), most, found)
            self._compare(COUNT.unpack(data)[0], len(found))
        except BaseException:
            close_all(found)
            raise
        return found

    def _compare(self, announced: int, came: int) -> None:
        if announced != came:
            raise MessageInvalid(f"{self.path} announced {announced} descriptors, {came} came")

    def _piece(self, size: int, most: int, found: list[int]) -> bytes:
        room = socket.CMSG_LEN(most * array.array("i").itemsize)
        data, controls, flags, _ = self._step(
            partial(self._connection.recvmsg, size, room, socket.MSG_CMSG_CLOEXEC)
        )
        for level, kind, content in controls:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                found.extend(numbers)
        if flags & socket.MSG_CTRUNC or len(found) > most:
            raise MessageInvalid(f"{self.path} sent more descriptors than the {most} that we accept")
        return self._some(data)

    def _some(self, data: bytes) -> bytes:
        if not data:
            raise ChannelClosed(f"{self.path} closed the connection")
        return data

    def _step(self, act: Callable[[], Result]) -> Result:
        waiting_for = f"descriptors from {self.path}"
        self._deadline.check(waiting_for)
        self._connection.settimeout(max(milliseconds(self._deadline), 1) / 1000)  # 0 would mean: for ever
        try:
            return act()
        except TimeoutError as error:
            raise self._deadline.exceeded(waiting_for) from error
        except OSError as error:
            raise ChannelClosed(f"{self.path}: {error}") from error
