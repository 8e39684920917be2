"""A listener under hostile traffic: whatever comes, a well-behaved client gets its answer and nothing grows."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from liveweight.errors import MessageInvalid, ProtocolMismatch
from liveweight.wire.codec import MAGIC
from liveweight.wire.credentials import client_keys, server_keys
from liveweight.wire.limits import WireLimits
from tests.support.wire import (
    CODEC,
    OTHER,
    SECRET,
    Echo,
    Ping,
    Pong,
    Say,
    channel,
    descriptors,
    leaving_nothing,
    resident_bytes,
    soon,
    tasks,
    wait_until,
)

LIMITS = WireLimits(message_bytes=65536, handshake_s=1.0)
MIB = 1024 * 1024
CONNECTIONS = 3000
CLAIMS = [65536 + 65, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


def connect(address: str) -> socket.socket:
    """A raw connection, which gives up rather than hangs."""
    if address.startswith("ipc://"):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(10)
        raw.connect(address.removeprefix("ipc://"))
        return raw
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def greeting(mechanism: bytes, minor: int = 0, as_server: int = 0) -> bytes:
    """The 64 bytes that open ZMTP 3."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x06" + struct.pack(">Q", len(content)) + content


def claim(chance: random.Random) -> bytes:
    """A frame that says it is huge."""
    return bytes([chance.choice([2, 3, 6])]) + struct.pack(">Q", chance.choice(CLAIMS)) + chance.randbytes(50)


ATTACKS: list[Callable[[random.Random], bytes]] = [
    lambda chance: chance.randbytes(chance.randrange(300)),
    lambda chance: greeting(b"CURVE")[: chance.randrange(64)],
    lambda _: greeting(b"NULL") + command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER"),
    lambda _: greeting(b"PLAIN") + command(b"HELLO", b"\x04user\x04pass"),
    lambda chance: greeting(chance.randbytes(20), as_server=chance.randrange(3)),
    lambda chance: greeting(b"CURVE", minor=chance.randrange(3)) + claim(chance),
    lambda chance: greeting(b"CURVE") + command(b"HELLO", b"\x01\0" + chance.randbytes(192)),
    lambda chance: greeting(b"CURVE") + command(b"HELLO", chance.randbytes(chance.randrange(400))),
    lambda chance: greeting(b"CURVE") + command(b"INITIATE", chance.randbytes(400)),
    lambda chance: greeting(b"CURVE") + command(b"MESSAGE", chance.randbytes(400)),
    lambda chance: greeting(b"CURVE") + command(b"ERROR", b"\xff" + chance.randbytes(20)),
    lambda chance: b"\x01\0" + claim(chance),  # ZMTP 1
    lambda chance: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * chance.randrange(1, 20),
]


def attack(address: str, chance: random.Random) -> None:
    """One hostile connection: speak, sometimes listen, leave."""
    with connect(address) as raw, suppress(OSError):  # it may be thrown out at any moment
        raw.sendall(chance.choice(ATTACKS)(chance))
        if chance.random() < 0.1:
            raw.shutdown(socket.SHUT_WR)
            raw.recv(200)


def test_thousands_of_hostile_connections_harm_nobody(address: str) -> None:
    chance = random.Random(7)
    with leaving_nothing(), Echo(address, limits=LIMITS) as echo, channel(echo.address) as asking:
        assert asking.request(Ping(0), soon(), "a pong") == Pong(0)
        for _ in range(100):
            attack(echo.address, chance)
        held, threads, resident = descriptors(), tasks(), resident_bytes()
        for n in range(CONNECTIONS):
            attack(echo.address, chance)
            if n % 500 == 0:
                assert asking.request(Ping(n), soon(), "a pong") == Pong(n)
        with channel(echo.address) as fresh:
            assert fresh.request(Ping(1), soon(), "a pong") == Pong(1)
        wait_until("hostile connections to be closed", lambda: descriptors() <= held)
        wait_until("no more threads", lambda: tasks() <= threads)
        assert resident_bytes() - resident < 32 * MIB
        assert echo.listener.refused == 0  # nothing of it came through


def test_silent_connections_are_dropped_and_delay_nobody(address: str) -> None:
    with Echo(address, limits=LIMITS) as echo:
        silent = [connect(echo.address) for _ in range(100)]
        for n, raw in enumerate(silent):
            raw.sendall(greeting(b"CURVE")[: n % 65])
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
        for raw in silent:
            with raw, suppress(ConnectionError):
                while raw.recv(4096):  # until the listener closes it
                    pass


def test_a_claimed_size_is_never_allocated(address: str) -> None:
    with Echo(address, limits=LIMITS) as echo:
        resident = resident_bytes()
        held = [connect(echo.address) for _ in range(50)]
        for n, raw in enumerate(held):
            with suppress(ConnectionError):
                raw.sendall(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", CLAIMS[n % len(CLAIMS)]))
                raw.sendall(bytes(20_000))
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
        assert resident_bytes() - resident < 32 * MIB
        for raw in held:
            raw.close()


@contextmanager
def insider(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that holds the secret but does not keep to our protocol."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 5000
        socket.rcvtimeo = 10_000
        keys = client_keys(SECRET)
        socket.curve_serverkey = server_keys(SECRET).public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.private
        socket.connect(address)
        yield socket


def test_garbage_from_holders_of_the_secret_is_counted_and_dropped(address: str) -> None:
    chance = random.Random(11)
    valid = CODEC.encode(Say("x", data=bytes(100)), call=3, limits=LIMITS)
    with leaving_nothing(), Echo(address, limits=LIMITS) as echo, channel(echo.address) as asking:
        with insider(echo.address) as inside:
            for _ in range(2000):
                frame = bytearray(valid)
                frame[chance.randrange(2)] ^= 1 << chance.randrange(8)
                inside.send(
                    chance.choice(
                        [bytes(frame), valid[: chance.randrange(4)], (CODEC.greeting + b"\x91") * 200]
                    )
                )
            for parts in ([b"", b""], [valid, valid], [valid] * 50):
                inside.send_multipart(parts)
            inside.send(CODEC.encode(Ping(9), call=4, limits=LIMITS))
            reply = CODEC.decode(inside.recv(), limits=LIMITS)
            assert (reply.call, reply.body) == (4, Pong(9))
        assert echo.listener.refused == 2003
        assert isinstance(echo.listener.last_refusal, MessageInvalid)
        assert asking.request(Ping(1), soon(), "a pong") == Pong(1)


def test_a_refusal_is_not_answered_by_a_refusal(address: str) -> None:
    with Echo(address) as echo, insider(echo.address) as inside:
        inside.send(CODEC.refusal(OTHER))
        inside.send(struct.pack("<2sH", MAGIC, OTHER) + b"whatever that version says")
        inside.send(CODEC.greeting)
        assert inside.recv() == CODEC.refusal(OTHER)
        assert inside.recv() == CODEC.greeting
        assert echo.listener.refused == 2
        assert isinstance(echo.listener.last_refusal, ProtocolMismatch)


def test_a_flood_of_garbage_does_not_outlast_a_deadline(tmp_path: Path) -> None:
    with (
        Echo(f"ipc://{tmp_path}/socket", limits=WireLimits(queue=50)) as echo,
        insider(echo.address) as inside,
    ):
        for _ in range(5000):
            inside.send(os.urandom(30))
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
        wait_until("all garbage to be counted", lambda: echo.listener.refused == 5000)
