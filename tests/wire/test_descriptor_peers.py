"""Descriptor servers and clients that misbehave: each is left, and nothing of theirs stays open."""

from __future__ import annotations

import array
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    MessageInvalid,
    WireError,
    WrongSecret,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire import descriptor_proof
from liveweight.wire.descriptor_server import DescriptorServer
from liveweight.wire.descriptors import COUNT, fetch
from liveweight.wire.limits import WireLimits
from tests.support.wire import (
    SECRET,
    leaving_nothing,
    memory,
    soon,
    wait_until,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "descriptors"


@pytest.fixture
def server(path: Path) -> Iterator[DescriptorServer]:
    with leaving_nothing(), DescriptorServer(path, SECRET) as serving:
        yield serving


Script = Callable[[socket.socket], None]


@contextmanager
def impostor(path: Path, script: Script) -> Iterator[None]:
    """A server that follows its own script with one client."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            script(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


def admit(connection: socket.socket) -> None:
    """Play an honest server up to the token."""
    ours = descriptor_proof.nonce()
    connection.sendall(descriptor_proof.MAGIC + ours)
    theirs = connection.recv(64)[:32]
    connection.sendall(descriptor_proof.ADMITTED + descriptor_proof.of_server(SECRET, ours, theirs))
    connection.recv(100)


def hand(connection: socket.socket, data: bytes, count: int) -> None:
    with memory() as held:
        rights = array.array("i", [held] * count)
        connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def after_proof(*pieces: tuple[bytes, int]) -> Script:
    """Hand over so many descriptors with each piece, then end."""

    def script(connection: socket.socket) -> None:
        admit(connection)
        for data, count in pieces:
            hand(connection, data, count) if count else connection.sendall(data)

    return script


def reflect(connection: socket.socket) -> None:
    """Send the client's own proof back."""
    connection.sendall(descriptor_proof.MAGIC + descriptor_proof.nonce())
    connection.sendall(descriptor_proof.ADMITTED + connection.recv(64)[32:])


def only(data: bytes) -> Script:
    def script(connection: socket.socket) -> None:
        connection.sendall(data)
        with suppress(OSError):  # the client may have left
            connection.shutdown(socket.SHUT_WR)
            connection.recv(200)

    return script


IMPOSTORS: dict[str, tuple[Script, type[WireError]]] = {
    "says nothing and leaves": (only(b""), ChannelClosed),
    "is something else": (only(b"HTTP/1.1 400 Bad Request" + b" " * 40), MessageInvalid),
    "leaves in its greeting": (only(descriptor_proof.MAGIC + b"x"), ChannelClosed),
    "leaves after its greeting": (only(descriptor_proof.MAGIC + bytes(32)), ChannelClosed),
    "refuses": (only(descriptor_proof.MAGIC + bytes(32) + descriptor_proof.REFUSED), WrongSecret),
    "makes up a proof": (
        only(descriptor_proof.MAGIC + bytes(32) + descriptor_proof.ADMITTED + bytes(32)),
        WrongSecret,
    ),
    "reflects our proof": (reflect, WrongSecret),
    "hands over more than announced": (after_proof((COUNT.pack(1), 2)), MessageInvalid),
    "hands over less than announced": (after_proof((COUNT.pack(3), 2)), MessageInvalid),
    "announces what does not come": (after_proof((COUNT.pack(3), 0)), MessageInvalid),
    "hands over more than fit": (after_proof((COUNT.pack(200), 200)), MessageInvalid),
    "hands over in two pieces too many": (after_proof((b"\x41", 64), (b"\0", 1)), MessageInvalid),
    "leaves half-way": (after_proof((b"\x02", 2)), ChannelClosed),
    "hands over what it calls nothing": (after_proof((COUNT.pack(0), 5)), MessageInvalid),
}


@pytest.mark.parametrize("what", IMPOSTORS)
def test_a_server_that_misbehaves_is_left_with_nothing_open(path: Path, what: str) -> None:
    script, error = IMPOSTORS[what]
    with leaving_nothing(), impostor(path, script), pytest.raises(error):
        fetch(path, SECRET, b"t", soon(60))


def test_a_server_that_is_silent_is_left_at_the_deadline(path: Path) -> None:
    def silent(connection: socket.socket) -> None:
        connection.recv(1)  # ends when the client leaves

    with leaving_nothing(), impostor(path, silent), pytest.raises(DeadlineExceeded, match=path.name) as late:
        fetch(path, SECRET, b"t", Deadline.after(0.3))
    assert late.value.waited_s < 3


def test_a_server_that_trickles_is_left_at_the_deadline(path: Path) -> None:
    def trickle(connection: socket.socket) -> None:
        pause = threading.Event()
        connection.sendall(descriptor_proof.MAGIC)
        try:
            while not pause.wait(0.05):
                connection.sendall(b"x")
        except OSError:
            return

    with leaving_nothing(), impostor(path, trickle), pytest.raises(DeadlineExceeded):
        fetch(path, SECRET, b"t", Deadline.after(0.3))


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(path))
    return client


def test_silent_clients_delay_nobody_and_give_way(path: Path) -> None:
    limits = WireLimits(clients=8)
    with leaving_nothing(), DescriptorServer(path, SECRET, limits) as server, memory() as held:
        server.register(b"t", [held])
        silent = [raw(path) for _ in range(30)]
        began = time.monotonic()
        os.close(*fetch(path, SECRET, b"t", soon()))
        assert time.monotonic() - began < 2
        wait_until("the oldest to give way", lambda: server.refused >= 22)
        for client in silent:
            client.close()


def test_a_silent_client_is_dropped_after_its_time(path: Path) -> None:
    limits = WireLimits(handshake_s=0.2)
    with leaving_nothing(), DescriptorServer(path, SECRET, limits) as server, raw(path) as client:
        assert client.recv(100).startswith(descriptor_proof.MAGIC)
        assert client.recv(100) == b""
        assert "too long" in str(server.last_refusal)


def test_garbage_on_the_socket_harms_nobody(server: DescriptorServer) -> None:
    chance = random.Random(3)
    with memory() as held:
        server.register(b"t", [held])
        with leaving_nothing():
            for _ in range(3000):
                with raw(server.path) as client, suppress(ConnectionError):
                    if chance.random() < 0.9:
                        client.sendall(chance.randbytes(chance.choice([1, 32, 63, 64, 65, 200])))
                    if chance.random() < 0.2:
                        hand(client, b"x", 3)
                    if chance.random() < 0.1:
                        client.shutdown(socket.SHUT_WR)
                        client.recv(200)
            os.close(*fetch(server.path, SECRET, b"t", soon()))
            wait_until("all to be refused", lambda: server.refused == 3000)
        server.withdraw(b"t")


def test_a_client_that_proved_the_secret_may_still_be_refused_for_its_token(server: DescriptorServer) -> None:
    for size in (0, 65, 255):
        with raw(server.path) as client:
            theirs = client.recv(100)[len(descriptor_proof.MAGIC) :]
            ours = descriptor_proof.nonce()
            client.sendall(ours + descriptor_proof.of_client(SECRET, theirs, ours))
            assert client.recv(100) == descriptor_proof.ADMITTED + descriptor_proof.of_server(
                SECRET, theirs, ours
            )
            client.sendall(bytes([size]))
            assert client.recv(100) == b""
        assert isinstance(server.last_refusal, MessageInvalid)


def test_a_proof_cannot_be_played_again(server: DescriptorServer) -> None:
    with raw(server.path) as client:
        theirs = client.recv(100)[len(descriptor_proof.MAGIC) :]
        ours = descriptor_proof.nonce()
        shown = ours + descriptor_proof.of_client(SECRET, theirs, ours)
        client.sendall(shown)
        assert client.recv(100).startswith(descriptor_proof.ADMITTED)
    with raw(server.path) as client:
        client.recv(100)
        client.sendall(shown)
        assert client.recv(100) == descriptor_proof.REFUSED
