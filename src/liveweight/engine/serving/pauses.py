"""Pauses: an operator, a round or sleep pauses an engine's requests. Requests go on when none of them does any more.

An operator's pause lasts until an operator resumes. The end of a round's pause never ends an operator's.
"""

from __future__ import annotations

from collections.abc import Callable

from liveweight.engine.serving.engine_loop import EngineLoop
from liveweight.engine.status import PauseMode
from liveweight.errors import WrongState
from liveweight.spec.deadline import Deadline

POLL_S = 0.5
"""How often a round that waits for its pause checks whether it is to end."""


class Pauses:
    """The pauses of one engine. For any thread."""

    def __init__(self, engine_loop: EngineLoop, check_open: Callable[[], None]) -> None:
        """`check_open` raises where the engine runs no requests; called with the engine loop's lock held."""
        self._engine_loop, self._check_open = engine_loop, check_open
        self._operator = False
        self._round: str | None = None
        self._asleep = False

    @property
    def by_operator(self) -> bool:
        """Whether an operator has paused, and none has resumed since."""
        return self._operator

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """An operator's pause. DeadlineExceeded if requests still run at the deadline; the pause comes into effect later."""
        deadline = Deadline.after(timeout_s)
        with self._engine_loop.lock:
            self._check_open()
            self._operator = True
            self._begin(mode)
        self._await(mode, deadline)

    def resume(self) -> None:
        """An operator's resume: requests run again, whoever paused. WrongState while the engine sleeps: wake it up instead."""
        with self._engine_loop.lock:
            if self._asleep:
                raise WrongState("asleep", "resume")
            self._operator, self._round = False, None
            self._engine_loop.scheduler.resume()
        self._engine_loop.ranks.wake()

    def fall_asleep(self, deadline: Deadline) -> None:
        """Pause requests until `wake_up`. DeadlineExceeded if requests still run at the deadline; `wake_up` ends the pause then, too."""
        with self._engine_loop.lock:
            self._check_open()
            self._asleep = True
            self._engine_loop.scheduler.pause(drain=False)
        self._await("keep", deadline)
        with self._engine_loop.lock:
            self._check_open()

    def wake_up(self) -> None:
        """The engine is awake: requests go on, unless an operator or a round has paused them."""
        with self._engine_loop.lock:
            self._asleep = False
            if not self._operator and self._round is None:
                self._engine_loop.scheduler.resume()
        self._engine_loop.ranks.wake()

    def pause_for(
        self, call: str, mode: PauseMode, deadline: Deadline, check_continue: Callable[[], None]
    ) -> None:
        """A round's pause. Does nothing if the engine is paused already. `check_continue` raises to end the wait early."""
        with self._engine_loop.lock:
            self._check_open()
            if self._operator or self._asleep:
                return
            self._round = call
            self._begin(mode)
        self._engine_loop.ranks.wake()
        while True:
            check_continue()
            with self._engine_loop.lock:
                if self._engine_loop.quiet.wait_for(
                    self._engine_loop.pause_settled, deadline.within(POLL_S).remaining_s()
                ):
                    return
            deadline.check(_waited_for(mode))

    def resume_from(self, call: str) -> None:
        """The round's pause is over, if there is one. An operator's stays."""
        with self._engine_loop.lock:
            if self._round != call:
                return
            self._round = None
            if not self._operator and not self._asleep:
                self._engine_loop.scheduler.resume()
        self._engine_loop.ranks.wake()

    def _begin(self, mode: PauseMode) -> None:
        self._engine_loop.scheduler.pause(drain=mode == "wait" and not self._asleep)
        if mode == "abort":
            self._engine_loop.cancelled += self._engine_loop.scheduler.numbers(running=True)

    def _await(self, mode: PauseMode, deadline: Deadline) -> None:
        self._engine_loop.ranks.wake()
        with self._engine_loop.lock:
            if not self._engine_loop.quiet.wait_for(self._engine_loop.pause_settled, deadline.remaining_s()):
                raise deadline.exceeded(_waited_for(mode))


def _waited_for(mode: PauseMode) -> str:
    return "running requests to finish" if mode == "wait" else "the steps in flight"
