"""The torture's handle of a trainer process: sends it orders, receives its messages, and ends it."""

from __future__ import annotations

import select
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence

from liveweight.engine.serving.step_channel import StepChannel
from liveweight.errors import ChannelClosed
from liveweight.lab.torn_demo.processes import ChildFailed
from liveweight.lab.torture.fork_server import ForkServer
from liveweight.lab.torture.trainer_main import (
    FromTrainer,
    Publish,
    PublishingConfig,
    RoundReached,
    RoundResult,
    TrainerReady,
    WritingConfig,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.waker import Waker


class TrainerProcess:
    """One trainer. For one thread."""

    def __init__(
        self,
        fork_server: ForkServer,
        role: str,
        config: PublishingConfig | WritingConfig,
        deadline: Deadline,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the process, and wait until it is ready; raises its own failure. Calls `reached` with the moments that it reports."""
        self._reached = reached
        ours, theirs = socket.socketpair()
        self._channel: StepChannel[FromTrainer] = StepChannel(ours, FromTrainer, peer="a trainer")
        with theirs:
            self.process = fork_server.fork(role, theirs)
        self._messages: deque[FromTrainer] = deque()
        self.alive = True
        self.stopped = False
        try:
            self._channel.send(config)
            self.parameters = self._await_ready(deadline)
        except BaseException:
            self.kill()
            raise

    def begin(self, order: Publish) -> None:
        """Let the trainer publish. ChannelClosed if the process is gone."""
        self._channel.send(order)

    def ended(self, timeout_s: float, wakers: Sequence[Waker] = ()) -> RoundResult | None:
        """The result of its round, if it arrives within that time, and before a waker wakes or another message arrives. None if the
        process has exited."""
        if not self.alive:
            return None
        waited: list[StepChannel[FromTrainer] | Waker] = [self._channel, *wakers]
        if not self._messages and self._channel not in select.select(waited, [], [], timeout_s)[0]:
            return None
        match self._next_message():
            case RoundResult() as ended:
                return ended
            case RoundReached(name=name):
                self._reached(name)
        return None

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send(number)
        self.stopped = (self.stopped or number == signal.SIGSTOP) and number != signal.SIGCONT

    def kill(self) -> None:
        """Kill the process; it has exited on return."""
        self.process.kill()
        self.process.wait()
        if self.alive:
            self.alive = False
            self._channel.close()

    def _await_ready(self, deadline: Deadline) -> int:
        if not select.select([self._channel], [], [], deadline.remaining_s())[0]:
            raise deadline.exceeded("a trainer to be ready")
        message = self._next_message()
        if not isinstance(message, TrainerReady):
            raise ChannelClosed("a trainer ended before it was ready")
        return message.parameters

    def _next_message(self) -> FromTrainer | None:
        """The next message; None if the process has exited without one."""
        try:
            while not self._messages:
                self._messages += self._channel.arrived()
        except ChannelClosed:
            self.kill()
            return None
        message = self._messages.popleft()
        if isinstance(message, ChildFailed):
            self.kill()
            raise message.fault.to_error()
        return message
