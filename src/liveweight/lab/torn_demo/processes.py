"""Processes of the torn demo: each runs one function of this package, with a channel to the program that started it.

Owns the end of the processes. A process exits when its channel closes, so none outlives the program, even if that is killed. A terminal's
Ctrl-C reaches the program alone, which then ends them.
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
    """A running engine: its URL, and the process ids of its ranks."""

    url: str
    pids: tuple[int, ...]


class ChildMessage(msgspec.Struct, frozen=True, tag=True):
    """From a process: it is ready, in the middle of its update, or done; with a text for the view."""

    what: Literal["ready", "middle", "done"]
    text: str = ""
    served: Served | None = None


class ChildFailed(msgspec.Struct, frozen=True, tag=True):
    """From a process that failed; its last message."""

    fault: Fault


class Go(msgspec.Struct, frozen=True, tag=True):
    """To a process: go on, with the engine that it was waiting for."""

    served: Served | None = None


AnyChildMessage: TypeAlias = ChildMessage | ChildFailed
Config = TypeVar("Config", bound=msgspec.Struct)
Received = TypeVar("Received")


class TornProcess:
    """A process that runs `main` with `config`. Ends with the `with`: by itself, or killed after `grace_s`."""

    def __init__(
        self,
        name: str,
        main: Callable[[int], None],
        config: msgspec.Struct,
        *,
        grace_s: float = 2.0,
    ) -> None:
        """`main` is called with the descriptor of its end of the channel; it must call `run`."""
        self.name, self._grace_s = name, grace_s
        self._messages: deque[AnyChildMessage] = deque()
        ours, theirs = socket.socketpair()
        self._channel: StepChannel[AnyChildMessage] = StepChannel(ours, AnyChildMessage, peer=name)
        code = f"from {main.__module__} import {main.__name__} as main; main({theirs.fileno()})  # {name}"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            self._channel.send(config)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def receive(self, what: str, deadline: Deadline) -> ChildMessage:
        """Wait for this message. Raises the process's own failure; ChannelClosed if it exited without a message."""
        while not self._messages:
            if not select.select([self._channel], [], [], deadline.remaining_s())[0]:
                raise deadline.exceeded(f"{self.name} to be {what}")
            try:
                self._messages += self._channel.arrived()
            except ChannelClosed as error:
                raise ChannelClosed(f"{self.name} {self._ended()} before it was {what}") from error
        message = self._messages.popleft()
        if isinstance(message, ChildFailed):
            raise message.fault.to_error()
        if message.what != what:
            raise ChannelClosed(f"{self.name} is {message.what}, not {what}")
        return message

    def go(self, served: Served) -> None:
        """Let it go on, with this engine."""
        self._channel.send(Go(served))

    def kill(self) -> None:
        """`kill -9`; the process has exited on return."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the channel, which ends the process; kill the process if it does not exit in time."""
        self._channel.close()
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
            return "closed its channel"


def engine_of(channel: StepChannel[Config | Go]) -> Served:
    """Called in a trainer: wait for Go, and return its engine."""
    message = channel.receive()
    if not isinstance(message, Go) or message.served is None:
        raise MessageInvalid("a trainer expects Go, with an engine")
    return message.served


def run(
    descriptor: int, config: type[Config], main: Callable[[StepChannel[Config | Go], Config], None]
) -> None:
    """Called in the process: receive the configuration, then call `main`, which receives only Go. Sends a LiveWeightError to the program.

    If the program has closed the channel, the process exits without a message.
    """

    def checked(channel: StepChannel[Config | Go], first: Config | Go) -> None:
        if isinstance(first, config):
            main(channel, first)

    run_with(descriptor, config | Go, checked)


def run_with(
    descriptor: int, receives: object, main: Callable[[StepChannel[Received], Received], None]
) -> None:
    """The same for a process that receives other messages: `main` is called with the first of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as end:
        channel: StepChannel[Received] = StepChannel(end, receives, peer="the program that started it")
        try:
            main(channel, channel.receive())
        except LiveWeightError as error:
            with suppress(ChannelClosed):
                channel.send(ChildFailed(fault_of(error, step="demo")))
