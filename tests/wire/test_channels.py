"""Channels between real processes, over unix sockets and TCP: what is sent arrives, once and in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    MessageTooLarge,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Listener
from tests.support.wire import (
    CODEC,
    SECRET,
    Echo,
    Ping,
    Pong,
    Say,
    Small,
    channel,
    echo_process,
    leaving_nothing,
    next_message,
    ping_process,
    process,
    soon,
)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to listen: a path in a private directory, or any free port."""
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_processes_ask_and_answer(address: str) -> None:
    with (
        leaving_nothing(),
        process(echo_process, address, None) as (_, pipe),
        channel(next_message(pipe)) as asking,
    ):
        for n in range(200):
            assert asking.request(Ping(n), soon(), "a pong") == Pong(n)
        large = Say("large", data=os.urandom(8_000_000))
        assert asking.request(large, soon(), "the same") == large


def test_many_processes_are_answered_each_its_own(address: str) -> None:
    with (
        leaving_nothing(),
        Echo(address) as echo,
        process(ping_process, echo.address) as (_, one),
        process(ping_process, echo.address) as (_, two),
    ):
        assert next_message(one) == next_message(two) == repr(Pong(5))


def raw_listener(context: zmq.Context[zmq.Socket[bytes]], address: str) -> tuple[zmq.Socket[bytes], str]:
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(address)
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def test_a_late_reply_never_answers_a_new_call(address: str) -> None:
    with Echo(address) as echo, channel(echo.address) as asking:
        with pytest.raises(DeadlineExceeded, match="an answer"):
            asking.request(Say("late"), Deadline.after(0.2), "an answer")
        assert asking.request(Ping(7), soon(), "a pong") == Pong(7)
        assert asking.receive_now() is None


def test_notifications_that_come_before_a_reply_are_kept_in_order(address: str) -> None:
    with Echo(address) as echo, channel(echo.address) as asking:
        assert asking.request(Say("chat", list=(50,)), soon(), "talk") == Pong(50)
        assert asking.request(Say("chat", list=(1,)), soon(), "talk") == Pong(1)
        received = [asking.receive(soon(), "talk") for _ in range(51)]
        assert received == [*(Say("aside", list=(n,)) for n in range(50)), Say("aside", list=(0,))]


def test_a_peer_that_talks_without_end_is_left(tmp_path: Path) -> None:
    with (
        Echo(f"ipc://{tmp_path}/socket") as echo,
        channel(echo.address, limits=WireLimits(queue=20)) as asking,
        pytest.raises(ChannelClosed, match="20 unread"),
    ):
        asking.request(Say("chat", list=(500,)), soon(), "talk")


def test_a_message_beyond_the_limit_is_refused_before_it_leaves(address: str) -> None:
    limits = WireLimits(message_bytes=1000)
    with Echo(address, limits=limits) as echo, channel(echo.address, limits=limits) as asking:
        with pytest.raises(MessageTooLarge):
            asking.request(Say("x" * 1000), soon(), "nothing")
        exact = Say("x", data=b"\0" * (1000 - len(CODEC.encode(Say("x"), call=1, limits=limits)) - 2))
        assert asking.request(exact, soon(), "the same") == exact


def test_a_message_beyond_the_peers_limit_costs_the_connection_and_nothing_else(address: str) -> None:
    with Echo(address, limits=WireLimits(message_bytes=1000)) as echo:
        with channel(echo.address) as asking, pytest.raises(ChannelClosed):
            asking.request(Say("x" * 100_000), soon(60), "nothing")
        with channel(echo.address) as asking:
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)


def test_closed_objects_say_so_and_close_again(address: str) -> None:
    with leaving_nothing():
        with Echo(address) as echo:
            asking = channel(echo.address)
            asking.close()
            asking.close()
            with pytest.raises(ChannelClosed, match="was closed"):
                asking.receive(soon(), "anything")
        listener = echo.listener
        listener.close()
        with pytest.raises(ChannelClosed, match="was closed"):
            listener.receive_now()
        with pytest.raises(ChannelClosed, match="was closed"):
            listener.send(b"x", Ping(1), 0, soon())


def test_a_users_own_zmq_is_left_alone(address: str) -> None:
    with zmq.Context() as context:
        theirs, bound = raw_listener(context, "tcp://127.0.0.1:0")
        with theirs, Echo(address) as echo, channel(echo.address) as asking:
            with context.socket(zmq.DEALER) as plain:
                plain.linger = 0
                plain.connect(bound)
                plain.send(b"hello")
                assert theirs.recv_multipart()[1] == b"hello"
            assert asking.request(Ping(1), soon(), "a pong") == Pong(1)


def test_the_typed_union_is_what_a_listener_gives(address: str) -> None:
    with Listener(address, SECRET, CODEC) as listener, process(ping_process, listener.address) as (_, pipe):
        incoming = listener.receive(soon(), "a ping")
        body: Small = incoming.body
        assert (body, incoming.call > 0) == (Ping(5), True)
        listener.send(incoming.peer, Pong(6), incoming.call + 1000, soon())  # the reply to no call of theirs
        listener.send(incoming.peer, Pong(5), incoming.call, soon())
        assert next_message(pipe) == repr(Pong(5))
