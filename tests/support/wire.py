"""For tests of the wire: a small closed set of messages, peers in threads and processes, and what a process holds."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from liveweight.errors import LiveWeightError
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.codec import PROTOCOL, Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Incoming, Listener

SECRET = Secret(b"a secret that is only used by tests")
OTHER_SECRET = Secret(b"another secret that only tests use")


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Answered by Pong with the same number."""

    n: int


class Pong(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The answer to Ping."""

    n: int


class Say(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Orders to an echoing peer, and what it sends on its own."""

    text: str
    data: bytes = b""
    list: tuple[int, ...] = ()
    table: dict[str, tuple[float, str | None]] = {}


Small: TypeAlias = Ping | Pong | Say
CODEC: Codec[Small] = Codec(Small)
OTHER = PROTOCOL + 1
CODEC_OF_ANOTHER: Codec[Small] = Codec(Small, protocol=OTHER)


def soon(seconds: float = 20.0) -> Deadline:
    """A deadline that only a broken test reaches."""
    return Deadline.after(seconds)


def wait_until(what: str, holds: Callable[[], bool], deadline: Deadline | None = None) -> None:
    """Wait for a state; fail naming it."""
    deadline = deadline or soon()
    poll = threading.Event()
    while not holds():
        deadline.check(what)
        poll.wait(0.005)


@contextmanager
def memory(content: bytes = b"") -> Iterator[int]:
    """An open memfd."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def descriptors() -> int:
    """How many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def tasks() -> set[str]:
    """The threads of this process, those of libraries included. One that was joined may be listed a moment longer."""
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208


def resident_bytes() -> int:
    """How much memory of this process is resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Assert that the block leaves no thread that it did not find, and no more descriptors."""
    resource_tracker.ensure_running()  # of multiprocessing: a descriptor that comes with the first process
    held, threads = descriptors(), tasks()
    yield
    wait_until(f"{held} descriptors", lambda: descriptors() <= held)
    wait_until("the threads of before", lambda: tasks() <= threads)


def answer(listener: Listener[Small], incoming: Incoming[Small]) -> None:
    """What an echoing peer does with a message."""
    match incoming.body:
        case Ping(n=n):
            listener.send(incoming.peer, Pong(n), incoming.call, soon())
        case Say(text="late"):  # answers this call only after the next one came
            following = listener.receive(soon(), "the next call")
            listener.send(incoming.peer, Say("late"), incoming.call, soon())
            answer(listener, following)
        case Say(text="chat", list=(count,)):
            for n in range(count):
                listener.send(incoming.peer, Say("aside", list=(n,)), 0, soon())
            listener.send(incoming.peer, Pong(count), incoming.call, soon())
        case Say(text="silence"):
            pass
        case Say(text="die"):
            os.kill(os.getpid(), 9)
        case other:
            listener.send(incoming.peer, other, incoming.call, soon())


class Echo:
    """A listener that answers, in a thread of this process."""

    def __init__(
        self,
        address: str,
        secret: Secret = SECRET,
        codec: Codec[Small] = CODEC,
        limits: WireLimits | None = None,
    ) -> None:
        self._made = threading.Event()
        self._stopping = False
        self._arguments = (address, secret, codec, limits)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Listener(*self._arguments) as self.listener:
            self._made.set()
            while not self._stopping:
                incoming = self.listener.receive_or_wake(soon(100), "a message or the end")
                if incoming is not None:
                    with suppress(LiveWeightError):
                        answer(self.listener, incoming)

    def __enter__(self) -> Echo:
        self._thread.start()
        if not self._made.wait(10):
            raise AssertionError("no listener")
        self.address = self.listener.address
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self.listener.waker().wake()
        self._thread.join(10)
        if self._thread.is_alive():
            raise AssertionError("a wake did not end the wait")


def channel(
    address: str, secret: Secret = SECRET, codec: Codec[Small] = CODEC, limits: WireLimits | None = None
) -> Channel[Small]:
    """A channel to an echoing peer."""
    return Channel(address, secret, codec, limits, deadline=soon())


def echo_process(pipe: Connection, address: str, limits: WireLimits | None) -> None:
    """The body of a child that echoes until it is killed; sends its address first."""
    with Listener(address, SECRET, CODEC, limits) as listener:
        pipe.send(listener.address)
        while True:
            answer(listener, listener.receive(soon(100), "a message"))


def ping_process(pipe: Connection, address: str) -> None:
    """The body of a child that connects, calls, sends what it got, and waits to be killed."""
    with Channel(address, SECRET, CODEC, deadline=soon()) as asking:
        reply = asking.request(Ping(5), soon(), "a pong")
        pipe.send(repr(reply))
        pipe.recv()


@contextmanager
def process(body: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Run `body(pipe, *arguments)` in a fresh process, killed at the end; yields the process and our end of the pipe."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    child = spawning.Process(target=body, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join(10)
        child.close()
        ours.close()


def next_message(pipe: Connection) -> Any:
    """The next message of a child; a child that sends nothing fails the test."""
    if not pipe.poll(20):
        raise AssertionError("a child sent nothing")
    return pipe.recv()
