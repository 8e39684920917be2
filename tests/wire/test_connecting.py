"""Connecting: who is let in, who is refused and how soon, and that nothing is left behind."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import zmq

from liveweight.errors import (
    ChannelClosed,
    CredentialsUnsafe,
    DeadlineExceeded,
    ProtocolMismatch,
    Unavailable,
    WrongSecret,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.codec import PROTOCOL
from liveweight.wire.credentials import load_or_create_secret, server_keys
from liveweight.wire.listener import Listener
from tests.support.wire import (
    CODEC,
    CODEC_OF_ANOTHER,
    OTHER,
    OTHER_SECRET,
    SECRET,
    Echo,
    Ping,
    Pong,
    channel,
    echo_process,
    leaving_nothing,
    next_message,
    process,
    soon,
)

PROMPTLY_S = 3.0


"""Far below the deadlines that tests give, and far above what a busy machine needs."""


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to listen: a path in a private directory, or any free port."""
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_a_wrong_secret_is_told_at_once_and_the_listener_goes_on(address: str) -> None:
    with leaving_nothing(), Echo(address) as echo:
        began = time.monotonic()
        with pytest.raises(WrongSecret, match=echo.address.split("/")[-1]):
            channel(echo.address, OTHER_SECRET)
        assert time.monotonic() - began < PROMPTLY_S
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)


def test_a_listener_with_another_secret_learns_nothing_from_us(address: str) -> None:
    with leaving_nothing(), Listener(address, OTHER_SECRET, CODEC) as impostor:
        with pytest.raises(WrongSecret):
            channel(impostor.address)
        assert impostor.receive_now() is None
        assert impostor.refused == 0


def raw_listener(context: zmq.Context[zmq.Socket[bytes]], address: str) -> tuple[zmq.Socket[bytes], str]:
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(address)
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def test_a_listener_without_encryption_is_refused_at_once(address: str) -> None:
    with zmq.Context() as context:
        socket, bound = raw_listener(context, address)
        began = time.monotonic()
        with socket, leaving_nothing(), pytest.raises(WrongSecret):
            channel(bound)
        assert time.monotonic() - began < PROMPTLY_S


def test_who_knows_the_servers_public_key_but_not_the_secret_stays_outside(address: str) -> None:
    with Echo(address) as echo, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey = server_keys(SECRET).public
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(echo.address)
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        socket.disable_monitor()
        monitor.close()
        assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_another_protocol_version_is_named_on_both_sides(address: str) -> None:
    with leaving_nothing(), Echo(address) as echo:
        began = time.monotonic()
        with pytest.raises(ProtocolMismatch) as refused:
            channel(echo.address, codec=CODEC_OF_ANOTHER)
        assert time.monotonic() - began < PROMPTLY_S
        assert (refused.value.ours, refused.value.theirs) == (OTHER, PROTOCOL)
        reason = echo.listener.last_refusal
        assert isinstance(reason, ProtocolMismatch)
        assert (reason.ours, reason.theirs, echo.listener.refused) == (PROTOCOL, OTHER, 1)
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)


def test_where_nobody_listens_the_wait_ends_at_the_deadline_and_names_the_address(tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    with zmq.Context() as context, raw_listener(context, "tcp://127.0.0.1:0")[0] as free:
        closed = free.get_string(zmq.LAST_ENDPOINT)
    with process(echo_process, f"ipc://{stale}", None) as (child, pipe):
        next_message(pipe)
        child.kill()
        child.join()
    assert stale.exists()
    for address in (f"ipc://{tmp_path}/absent", f"ipc://{stale}", closed):
        with leaving_nothing(), pytest.raises(DeadlineExceeded, match=address.split("/")[-1]) as late:
            Channel(address, SECRET, CODEC, deadline=Deadline.after(0.3))
        assert 0.3 <= late.value.waited_s < PROMPTLY_S
    with Echo(f"ipc://{stale}") as echo, channel(echo.address):
        pass


def test_one_that_was_there_is_gone_where_nobody_listens_any_more(tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    with process(echo_process, f"ipc://{stale}", None) as (child, pipe):
        next_message(pipe)
        with Channel(f"ipc://{stale}", SECRET, CODEC, deadline=soon(), waits=False) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
        child.kill()
        child.join()
    for address in (f"ipc://{tmp_path}/absent", f"ipc://{stale}"):
        with leaving_nothing(), pytest.raises(ChannelClosed, match="gone: nobody listens"):
            Channel(address, SECRET, CODEC, deadline=soon(), waits=False)


@pytest.mark.parametrize("family", ["ipc", "tcp"])
def test_one_that_ends_during_the_hand_shake_is_gone(tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "socket")
    dying = socket.socket(socket.AF_UNIX if family == "ipc" else socket.AF_INET)
    dying.bind(path if family == "ipc" else ("127.0.0.1", 0))
    address = f"ipc://{path}" if family == "ipc" else f"tcp://127.0.0.1:{dying.getsockname()[1]}"
    dying.listen()

    def die() -> None:
        with dying, dying.accept()[0]:
            dying.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(ChannelClosed, match="gone: nobody listens"):
        Channel(address, SECRET, CODEC, deadline=soon(), waits=False)
    thread.join()


def test_a_channel_waits_for_a_listener_that_comes_later(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    echo = Echo(address)
    starting = threading.Timer(0.3, echo.__enter__)
    starting.start()
    with channel(address) as asking:
        assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
    starting.join()
    echo.__exit__()


def test_an_owner_that_does_not_receive_is_named_at_the_deadline(address: str) -> None:
    with (
        leaving_nothing(),
        Listener(address, SECRET, CODEC) as busy,
        pytest.raises(DeadlineExceeded, match="to greet"),
    ):
        Channel(busy.address, SECRET, CODEC, deadline=Deadline.after(0.3))


def test_the_socket_file_goes_with_the_listener(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Listener(f"ipc://{path}", SECRET, CODEC) as listener:
        assert path.is_socket()
        with pytest.raises(Unavailable, match="another process listens"):
            Listener(listener.address, SECRET, CODEC)
        assert path.is_socket()
    assert not path.exists()


def test_an_address_that_cannot_be_served_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with leaving_nothing(), Echo("tcp://127.0.0.1:0") as echo:
        for address in (
            *(f"ipc://{tmp_path}/file", f"ipc://{tmp_path}/{'x' * 200}", echo.address, "tcp://nowhere"),
            *("ipc://", "ipc://@abstract", "ipc://*", "inproc://x", "", "tcp://127.0.0.1:99999"),
        ):
            with pytest.raises(Unavailable):
                Listener(address, SECRET, CODEC)
        with pytest.raises(CredentialsUnsafe):
            Listener(f"ipc://{tmp_path}/open/socket", SECRET, CODEC)
        for address in ("", "inproc://x", "tcp://127.0.0.1:99999", f"ipc://{tmp_path}/{'x' * 200}"):
            with pytest.raises(Unavailable):
                channel(address)
    assert (tmp_path / "file").read_text() == "precious"


def create_secret(pipe: Connection, path: Path) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(load_or_create_secret(path).derive("test"))


def test_processes_that_race_for_a_secret_get_the_same_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"secret{n}" for n in range(2)]
    for path in paths:
        with process(create_secret, path) as (_, one), process(create_secret, path) as (_, two):
            assert next_message(one) == next_message(two) == "ready"
            one.send("go")
            two.send("go")
            assert next_message(one) == next_message(two) == load_or_create_secret(path).derive("test")
    assert sorted(tmp_path.iterdir()) == paths


def test_threads_that_race_for_a_secret_get_the_same_one(tmp_path: Path) -> None:
    for n in range(50):
        path = tmp_path / f"secret{n}"
        gate = threading.Barrier(4)
        found: list[bytes] = []

        def race(path: Path = path, gate: threading.Barrier = gate, found: list[bytes] = found) -> None:
            gate.wait(10)
            found.append(load_or_create_secret(path).derive("test"))

        racing = [threading.Thread(target=race) for _ in range(4)]
        for thread in racing:
            thread.start()
        for thread in racing:
            thread.join()
        assert len(found) == 4
        assert len(set(found)) == 1
    assert len(list(tmp_path.iterdir())) == 50


def test_connecting_and_closing_again_and_again_leaves_nothing(address: str) -> None:
    with leaving_nothing(), Echo(address) as echo:
        for n in range(50):
            with channel(echo.address) as asking:
                assert asking.request(Ping(n), soon(), "a pong") == Pong(n)
