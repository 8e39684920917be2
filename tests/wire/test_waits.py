"""Waits: peers that end, do not read or vanish; deadlines, wakers, signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    WrongSecret,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Listener
from liveweight.wire.waker import Waker
from tests.support.processes.stopping import stop
from tests.support.wire import (
    CODEC,
    OTHER_SECRET,
    SECRET,
    Echo,
    Ping,
    Pong,
    Say,
    channel,
    echo_process,
    leaving_nothing,
    next_message,
    ping_process,
    process,
    soon,
    wait_until,
)

PROMPTLY_S = 3.0


"""Far below the deadlines that tests give, and far above what a busy machine needs."""


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to listen: a path in a private directory, or any free port."""
    return f"ipc://{tmp_path}/socket" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_a_peer_that_is_killed_ends_the_wait_promptly(address: str) -> None:
    with (
        leaving_nothing(),
        process(echo_process, address, None) as (child, pipe),
        channel(next_message(pipe)) as asking,
    ):
        killer = threading.Timer(0.2, child.kill)
        killer.start()
        began = time.monotonic()
        with pytest.raises(ChannelClosed, match="is gone"):
            asking.request(Say("silence"), soon(60), "a reply that never comes")
        assert time.monotonic() - began < PROMPTLY_S
        killer.join()
        for use in (
            lambda: asking.send(Ping(1), soon()),
            lambda: asking.receive(soon(), "more"),
            asking.receive_now,
            lambda: asking.request(Ping(1), soon(), "more"),
        ):
            with pytest.raises(ChannelClosed):
                use()


def test_what_a_peer_sent_before_it_was_killed_is_still_read(address: str) -> None:
    with process(echo_process, address, None) as (child, pipe), channel(next_message(pipe)) as asking:
        assert asking.request(Say("chat", list=(300,)), soon(), "talk") == Pong(300)
        child.kill()
        child.join()
        assert [asking.receive(soon(), "talk") for _ in range(300)] == [
            Say("aside", list=(n,)) for n in range(300)
        ]
        with pytest.raises(ChannelClosed):
            asking.receive(soon(60), "more talk")


def test_a_successor_at_the_same_address_gets_nothing_of_an_old_channel(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with process(echo_process, address, None) as (child, pipe):
        asking = channel(next_message(pipe))
        child.kill()
        child.join()
    with asking, Listener(address, SECRET, CODEC) as successor:
        with pytest.raises(ChannelClosed):
            asking.request(Ping(1), soon(60), "an answer of the dead")
        with pytest.raises(DeadlineExceeded):
            successor.receive(Deadline.after(0.5), "a message that must not come")
        assert successor.refused == 0


def test_a_reply_to_a_peer_that_left_says_so(address: str) -> None:
    with Listener(address, SECRET, CODEC) as listener:
        with process(ping_process, listener.address) as (child, _):
            incoming = listener.receive(soon(), "a ping")
            child.kill()
            child.join()

            def left() -> bool:
                try:
                    listener.send(incoming.peer, Pong(1), incoming.call, soon())
                except ChannelClosed:
                    return True
                return False

            wait_until("the peer's end to be known", left)
        with pytest.raises(ChannelClosed):
            listener.send(b"nobody", Pong(1), 0, soon())


def test_sending_to_a_peer_that_does_not_read_ends_at_the_deadline_without_spinning(address: str) -> None:
    limits = WireLimits(queue=10)
    blob = Say("blob", data=bytes(1_000_000))
    with (
        Listener(address, SECRET, CODEC, limits) as listener,
        process(ping_process, listener.address) as (stopped, _),
        process(ping_process, listener.address),
    ):
        one, two = (listener.receive(soon(), "two pings") for _ in range(2))
        stop(stopped.pid)
        for peer in (one.peer, two.peer):
            listener.send(peer, Pong(5), 1, soon())  # to both: one of them is stopped
        full = 0
        spent_s = 0.0
        for peer in (one.peer, two.peer):
            began_s, deadline = time.process_time(), Deadline.after(0.7)
            try:
                for _ in range(100):
                    listener.send(peer, blob, 0, deadline)
            except DeadlineExceeded as error:
                assert peer.hex() in str(error)
                full += 1
                spent_s = time.process_time() - began_s
        assert full >= 1
        assert spent_s < 0.6


def test_a_listener_that_does_not_receive_makes_senders_wait_until_their_deadline(address: str) -> None:
    limits = WireLimits(queue=10)
    greeted = threading.Event()

    def greet_only(pipe_address: list[str]) -> None:
        with Listener(address, SECRET, CODEC, limits) as listener:
            pipe_address.append(listener.address)
            listener.receive(soon(), "the first message")
            greeted.wait(30)

    where: list[str] = []
    owner = threading.Thread(target=greet_only, args=(where,))
    owner.start()
    wait_until("a listener", lambda: bool(where))
    with channel(where[0], limits=limits) as sending:
        sending.send(Ping(1), soon())
        with pytest.raises(DeadlineExceeded, match="to take a message"):
            deadline = Deadline.after(0.5)
            for _ in range(200):
                sending.send(Say("blob", data=bytes(1_000_000)), deadline)
        greeted.set()
        owner.join()


def test_a_vanished_host_is_noticed_by_its_silence() -> None:
    limits = WireLimits(heartbeat_s=0.1, silence_s=0.5)
    with (
        process(echo_process, "tcp://127.0.0.1:0", None) as (child, pipe),
        channel(next_message(pipe), limits=limits) as asking,
    ):
        stop(child.pid)
        with pytest.raises(ChannelClosed):
            asking.receive(soon(60), "anything")


@pytest.mark.parametrize("early", [True, False])
def test_a_wake_ends_a_wait_once(address: str, early: bool) -> None:
    with leaving_nothing(), Echo(address) as echo, channel(echo.address) as asking:
        waker = asking.waker()
        if early:
            waker.wake()
            waker.wake()
            thread = None
        else:
            thread = threading.Timer(0.2, waker.wake)
            thread.start()
        assert asking.receive_or_wake(soon(60), "work") is None
        with pytest.raises(DeadlineExceeded):
            asking.receive_or_wake(Deadline.after(0.05), "nothing")
        if thread is not None:
            thread.join()


def test_a_wake_waits_while_a_reply_is_awaited() -> None:
    with Echo("tcp://127.0.0.1:0") as echo, channel(echo.address) as asking:
        asking.waker().wake()
        assert asking.request(Ping(1), soon(), "a pong") == Pong(1)
        assert asking.receive_or_wake(soon(), "work") is None


def test_a_cancelled_request_ends_promptly_and_the_channel_stays_open(address: str) -> None:
    cancel = Waker()
    with (
        leaving_nothing(),
        process(echo_process, address, None) as (child, pipe),
        Channel(next_message(pipe), SECRET, CODEC, deadline=soon(), cancel=cancel) as asking,
    ):
        stop(child.pid)
        began = time.monotonic()
        canceller = threading.Timer(0.2, cancel.wake)
        canceller.start()
        for _ in range(2):  # once cancelled, it stays cancelled
            with pytest.raises(ChannelClosed, match="ended from this side"):
                asking.request(Ping(1), soon(60), "a pong")
        canceller.join()
        assert time.monotonic() - began < PROMPTLY_S
        os.kill(child.pid, signal.SIGCONT)
        assert asking.request(Ping(2), soon(), "a pong", cancellable=False) == Pong(2)
    cancel.close()


def test_cancelling_ends_the_wait_for_a_listener_that_is_not_there(tmp_path: Path) -> None:
    cancel = Waker()
    with leaving_nothing():
        canceller = threading.Timer(0.2, cancel.wake)
        canceller.start()
        began = time.monotonic()
        with pytest.raises(ChannelClosed, match="ended from this side"):
            Channel(f"ipc://{tmp_path}/nobody", SECRET, CODEC, deadline=soon(60), cancel=cancel)
        assert time.monotonic() - began < PROMPTLY_S
        canceller.join()
    cancel.close()


def test_a_waker_outlives_its_owner_without_harm(tmp_path: Path) -> None:
    with Listener(f"ipc://{tmp_path}/socket", SECRET, CODEC) as listener:
        waker = listener.waker()
    with (tmp_path / "bystander").open("wb") as bystander:  # likely has the descriptor's number now
        waker.wake()
        bystander.flush()
    assert (tmp_path / "bystander").read_bytes() == b""


def test_signals_do_not_prolong_a_wait(address: str, tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with (
            leaving_nothing(),
            Echo(address) as echo,
            channel(echo.address) as asking,
            Listener(f"ipc://{tmp_path}/idle", SECRET, CODEC) as idle,
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for wait in (
                lambda deadline: asking.receive(deadline, "nothing"),
                lambda deadline: asking.receive_or_wake(deadline, "nothing"),
                lambda deadline: idle.receive(deadline, "nothing"),
                lambda deadline: Channel(idle.address, OTHER_SECRET, CODEC, deadline=deadline),
            ):
                began = time.monotonic()
                with pytest.raises((DeadlineExceeded, WrongSecret)):
                    wait(Deadline.after(0.3))
                assert time.monotonic() - began < 1.5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_signals_do_not_leave_threads_behind(address: str) -> None:
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with leaving_nothing(), Echo(address) as echo:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for n in range(50):
                with channel(echo.address) as asking:
                    assert asking.request(Ping(n), soon(), "a pong") == Pong(n)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
