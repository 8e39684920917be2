"""The descriptor server: holds descriptors under tokens and hands copies to those who prove the secret.

Owns the listening socket, its file, one thread, and duplicates of what is registered.
The bytes of the conversation are in descriptor_proof and descriptors.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from array import array
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread
from typing import Self

from liveweight.errors import AddressUnusable, ChannelClosed, MessageInvalid, WireError, WrongSecret
from liveweight.wire import descriptor_proof
from liveweight.wire.credentials import Secret, socket_directory
from liveweight.wire.descriptors import COUNT, TOKEN_BYTES_MAX, check_token, close_all, peer_user
from liveweight.wire.limits import WireLimits
from liveweight.wire.sockets import refuse_if_taken, unlink_if_same
from liveweight.wire.waker import Waker

_BACKLOG = 128
_REST_S = 0.1
"""How long to accept nobody after accepting failed, for want of descriptors."""


@dataclass(slots=True, eq=False)
class _Client:
    """One connection. `steps` asks for a number of bytes and is resumed with them."""

    connection: socket.socket
    steps: Generator[int, bytes, None]
    ends_s: float
    wanted: int = 0
    got: bytearray = field(default_factory=bytearray)


class DescriptorServer:
    """Hands out what is registered. `register`, `withdraw` and `close` may be called from any thread.

    A client that is slow or silent delays nobody: one thread serves all, never waits for one of them, drops each
    after `limits.handshake_s`, and drops the oldest when there are more than `limits.clients`.
    """

    def __init__(self, path: Path, secret: Secret, limits: WireLimits | None = None) -> None:
        """Listen at that path, in a directory that is ours alone. What an ended process left there is replaced."""
        self.path = path
        self.refused = 0
        """Connections ended because they did not keep to the protocol."""
        self.last_refusal: WireError | None = None
        """Why the last of them was ended."""
        self._secret = secret
        self._limits = limits or WireLimits()
        self._lock = Lock()
        self._held: dict[bytes, list[int]] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._accepts_from_s = 0.0
        self._closed = False
        with ExitStack() as acquired:
            self._waker = Waker()
            acquired.callback(self._waker.close)
            self._socket = acquired.enter_context(_listening(path))
            acquired.callback(unlink_if_same, path, path.lstat())
            self._selector = acquired.enter_context(selectors.DefaultSelector())
            self._selector.register(self._waker, selectors.EVENT_READ)
            self._thread = Thread(target=self._run, name="liveweight-descriptors", daemon=True)
            self._thread.start()
            self._acquired = acquired.pop_all()

    def register(self, token: bytes, descriptors: Sequence[int]) -> None:
        """Offer duplicates of these under a token that is not in use; the originals stay the caller's."""
        check_token(token)
        if not 0 < len(descriptors) <= self._limits.descriptors:
            raise ValueError(f"{len(descriptors)} descriptors, the limit is {self._limits.descriptors}")
        duplicates: list[int] = []
        try:
            duplicates.extend(os.dup(descriptor) for descriptor in descriptors)
            self._hold(token, duplicates)
        except BaseException:
            close_all(duplicates)
            raise

    def _hold(self, token: bytes, duplicates: list[int]) -> None:
        with self._lock:
            if self._closed:
                raise ChannelClosed("this descriptor server was closed")
            if token in self._held:
                raise ValueError(f"token {token.hex()} is in use")
            self._held[token] = duplicates

    def withdraw(self, token: bytes) -> None:
        """Offer nothing under that token any more. What was handed out stays open at its receivers."""
        with self._lock:
            close_all(self._held.pop(token, []))

    def close(self) -> None:
        """End the thread and all connections, withdraw everything, remove the socket file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._waker.wake()
        self._thread.join()
        for token in tuple(self._held):
            self.withdraw(token)
        self._acquired.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._rest_s()):
                if key.fileobj is self._socket:
                    self._accept()
                elif isinstance(key.data, _Client) and key.data.connection in self._clients:
                    self._feed(key.data)
            self._expire()
        for client in tuple(self._clients.values()):
            self._drop(client)

    def _rest_s(self) -> float | None:
        """Until when nothing is due; the socket is polled unless accepting has just failed."""
        now = time.monotonic()
        due = [client.ends_s for client in self._clients.values()]
        listening = self._socket in self._selector.get_map()
        if now < self._accepts_from_s:
            due.append(self._accepts_from_s)
            if listening:
                self._selector.unregister(self._socket)
        elif not listening:
            self._selector.register(self._socket, selectors.EVENT_READ)
        return max(0.0, min(due) - now) if due else None

    def _expire(self) -> None:
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.ends_s <= now]:
            self._refuse(client, MessageInvalid("a client took too long to ask"))

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors left, for instance
            self._accepts_from_s = time.monotonic() + _REST_S
            return
        if len(self._clients) >= self._limits.clients:
            oldest = next(iter(self._clients.values()))
            self._refuse(oldest, MessageInvalid("too many clients: the oldest gave way"))
        connection.setblocking(False)
        ends_s = time.monotonic() + self._limits.handshake_s
        client = _Client(connection, self._converse(connection), ends_s)
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._advance(client, None)

    def _feed(self, client: _Client) -> None:
        """Read no more than the conversation wants now, and go on with it once that is complete."""
        try:
            data = client.connection.recv(client.wanted - len(client.got))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._refuse(client, ChannelClosed("a client left before it got an answer"))
            return
        client.got += data
        if len(client.got) == client.wanted:
            received = bytes(client.got)
            client.got.clear()
            self._advance(client, received)

    def _advance(self, client: _Client, received: bytes | None) -> None:
        try:
            client.wanted = next(client.steps) if received is None else client.steps.send(received)
        except StopIteration:
            self._drop(client)
        except WireError as error:
            self._refuse(client, error)
        except OSError as error:
            self._refuse(client, ChannelClosed(f"a client does not read: {error}"))

    def _refuse(self, client: _Client, error: WireError) -> None:
        self.refused += 1
        self.last_refusal = error
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.steps.close()
        client.connection.close()

    def _converse(self, connection: socket.socket) -> Generator[int, bytes, None]:
        """The server's part, from greeting to answer. Sends fit into the empty buffer of a socket."""
        if peer_user(connection) != os.geteuid():
            raise WrongSecret(f"user {peer_user(connection)} asked, we are {os.geteuid()}")
        ours = descriptor_proof.nonce()
        connection.send(descriptor_proof.MAGIC + ours)
        answer = yield descriptor_proof.NONCE_BYTES + descriptor_proof.MAC_BYTES
        theirs, shown = answer[: descriptor_proof.NONCE_BYTES], answer[descriptor_proof.NONCE_BYTES :]
        if not descriptor_proof.equal(shown, descriptor_proof.of_client(self._secret, ours, theirs)):
            connection.send(descriptor_proof.REFUSED)
            raise WrongSecret("a client does not hold our secret")
        connection.send(descriptor_proof.ADMITTED + descriptor_proof.of_server(self._secret, ours, theirs))
        (size,) = yield 1
        if not 0 < size <= TOKEN_BYTES_MAX:
            raise MessageInvalid(f"a token has 1 to {TOKEN_BYTES_MAX} bytes, not {size}")
        self._hand_out(connection, (yield size))

    def _hand_out(self, connection: socket.socket, token: bytes) -> None:
        with self._lock:  # so that nothing is withdrawn, and its number reused, while it is sent
            held = self._held.get(token, [])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", held))] if held else []
            connection.sendmsg([COUNT.pack(len(held))], rights)


def _listening(path: Path) -> socket.socket:
    socket_directory(path.parent)
    refuse_if_taken(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise AddressUnusable(f"cannot listen at {path}: {error}") from error
    return listener
