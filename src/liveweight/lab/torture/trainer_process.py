"""A trainer's process as the torture holds it: what it is told, what it says, and its end."""

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
    Publish,
    PublishingConfig,
    RoundReached,
    RoundResult,
    TrainerReady,
    Word,
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
        """Returns when it stands ready; its own failure is raised. `reached` is told the moments that it says of its rounds."""
        self._reached = reached
        ours, theirs = socket.socketpair()
        self._pipe: StepChannel[Word] = StepChannel(ours, Word, peer="a trainer")
        with theirs:
            self.process = fork_server.fork(role, theirs)
        self._words: deque[Word] = deque()
        self.alive = True
        self.stopped = False
        try:
            self._pipe.send(config)
            self.parameters = self._standing(deadline)
        except BaseException:
            self.kill()
            raise

    def begin(self, order: Publish) -> None:
        """Let it publish. ChannelClosed where it is gone."""
        self._pipe.send(order)

    def ended(self, timeout_s: float, wakers: Sequence[Waker] = ()) -> RoundResult | None:
        """How its round ended, if it says so within that time, and before a waker wakes or it says anything else. A trainer that is gone
        says nothing any more."""
        if not self.alive:
            return None
        waited: list[StepChannel[Word] | Waker] = [self._pipe, *wakers]
        if not self._words and self._pipe not in select.select(waited, [], [], timeout_s)[0]:
            return None
        match self._word():
            case RoundResult() as ended:
                return ended
            case RoundReached(name=name):
                self._reached(name)
        return None

    def send(self, number: int) -> None:
        """A signal."""
        self.process.send(number)
        self.stopped = (self.stopped or number == signal.SIGSTOP) and number != signal.SIGCONT

    def kill(self) -> None:
        """It has ended on return."""
        self.process.kill()
        self.process.wait()
        if self.alive:
            self.alive = False
            self._pipe.close()

    def _standing(self, deadline: Deadline) -> int:
        if not select.select([self._pipe], [], [], deadline.remaining_s())[0]:
            raise deadline.exceeded("a trainer to stand ready")
        word = self._word()
        if not isinstance(word, TrainerReady):
            raise ChannelClosed("a trainer ended before it stood ready")
        return word.parameters

    def _word(self) -> Word | None:
        """What it says; None where it has ended without a word."""
        try:
            while not self._words:
                self._words += self._pipe.arrived()
        except ChannelClosed:
            self.kill()
            return None
        word = self._words.popleft()
        if isinstance(word, ChildFailed):
            self.kill()
            raise word.fault.to_error()
        return word
