"""Processes of the torn demo: each runs one function of this package, with a pipe to the program that started it.

Owns their ends. A process ends with its pipe, so none outlives the program, however that ends; and a terminal's Ctrl-C reaches the program
alone, which then ends them.
"""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypeVar

import msgspec

from liveweight.engine.serving.step_channel import StepChannel
from liveweight.errors import ChannelClosed, LiveWeightError, MessageInvalid
from liveweight.spec.deadline import Deadline
from liveweight.wire.messages.values import Fault, fault_of

END_S = 5.0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine is: its URL, and the process ids of its ranks."""

    url: str
    pids: tuple[int, ...]


class ChildMessage(msgspec.Struct, frozen=True, tag=True):
    """What a process says: that it stands ready, that it is in the middle of its update, that it has done it; and what there is to say."""

    what: Literal["ready", "middle", "done"]
    text: str = ""
    served: Served | None = None


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """A process's last word."""

    fault: Fault


class Go(msgspec.Struct, frozen=True, tag=True):
    """To a process that said something: go on, with the engine that it was waiting for."""

    served: Served | None = None


Word: TypeAlias = ChildMessage | ChildFailed
Config = TypeVar("Config", bound=msgspec.Struct)
Heard = TypeVar("Heard")


class TornProcess:
    """A process that runs `main` with `config`. Ends with the `with`: by itself, or killed when it has not within `grace_s`."""

    def __init__(
        self,
        name: str,
        main: Callable[[int], None],
        config: msgspec.Struct,
        *,
        grace_s: float = 2.0,
    ) -> None:
        """`main` is called with the descriptor of its end of the pipe: it calls `run`."""
        self.name, self._grace_s = name, grace_s
        self._words: deque[Word] = deque()
        ours, theirs = socket.socketpair()
        self._pipe: StepChannel[Word] = StepChannel(ours, Word, peer=name)
        code = f"from {main.__module__} import {main.__name__} as main; main({theirs.fileno()})  # {name}"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            self._pipe.send(config)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def receive(self, what: str, deadline: Deadline) -> ChildMessage:
        """Wait until it says this. Its own failure is raised; ChannelClosed where it ended without a word."""
        while not self._words:
            if not select.select([self._pipe], [], [], deadline.remaining_s())[0]:
                raise deadline.exceeded(f"{self.name} to be {what}")
            try:
                self._words += self._pipe.arrived()
            except ChannelClosed as error:
                raise ChannelClosed(f"{self.name} {self._ended()} before it was {what}") from error
        word = self._words.popleft()
        if isinstance(word, ChildFailed):
            raise word.fault.to_error()
        if word.what != what:
            raise ChannelClosed(f"{self.name} is {word.what}, not {what}")
        return word

    def go(self, served: Served) -> None:
        """Let it go on, with this engine."""
        self._pipe.send(Go(served))

    def kill(self) -> None:
        """`kill -9`; it has ended on return."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End its pipe and with it the process; one that does not end in time is killed."""
        self._pipe.close()
        try:
            self._process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> str:
        try:
            return f"ended with code {self._process.wait(END_S)}"
        except subprocess.TimeoutExpired:
            return "closed its pipe"


def engine_of(pipe: StepChannel[Config | Go]) -> Served:
    """In a trainer: wait to be told to go, and with which engine."""
    word = pipe.receive()
    if not isinstance(word, Go) or word.served is None:
        raise MessageInvalid("a trainer is told to go, with an engine")
    return word.served


def run(
    descriptor: int, config: type[Config], main: Callable[[StepChannel[Config | Go], Config], None]
) -> None:
    """What a process does: hear its configuration, then `main`, which hears nothing but Go. An error of ours is its last word.

    A pipe that the program has closed ends it without one: nobody listens any more.
    """

    def checked(pipe: StepChannel[Config | Go], first: Config | Go) -> None:
        if isinstance(first, config):
            main(pipe, first)

    run_with(descriptor, config | Go, checked)


def run_with(descriptor: int, receives: object, main: Callable[[StepChannel[Heard], Heard], None]) -> None:
    """The same for a process that hears other words: `main` is called with the first of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as end:
        pipe: StepChannel[Heard] = StepChannel(end, receives, peer="the program that started it")
        try:
            main(pipe, pipe.receive())
        except LiveWeightError as error:
            with suppress(ChannelClosed):
                pipe.send(ChildFailed(fault_of(error, step="demo")))
