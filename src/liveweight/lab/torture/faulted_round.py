"""Runs a round with a strike, on any engine: a trainer begins the round, the strike falls at its moment, and the round must end in time."""

from __future__ import annotations

import os
import signal
import statistics
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from liveweight.errors import DeadlineExceeded, LiveWeightError
from liveweight.lab.torture.fault_plan import Strike
from liveweight.lab.torture.faults import cut, flip
from liveweight.lab.torture.round_moments import RoundMoments
from liveweight.lab.torture.targets.target import SLACK_S, StrikeCounts
from liveweight.lab.torture.trainer_main import Publish, RoundResult
from liveweight.lab.torture.trainer_process import TrainerProcess
from liveweight.spec.deadline import Deadline
from liveweight.trainer.settings import PublisherSettings, last_steps_s

POLL_S = 0.005
STEP_PART_S = 0.004
"""About how long the steps after staging take."""


class FaultedEngine(Protocol):
    """The engine whose rounds are struck. Called by the torture's thread."""

    def pid_of(self, strike: Strike) -> int:
        """The engine's process that the strike hits."""

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to that process of the engine. ProcessLookupError if it has exited."""

    def idle(self) -> bool:
        """Whether the engine serves, and no round is open."""

    def describe(self) -> str:
        """The engine's own status, for notes."""


class FaultedRounds:
    """Runs one round after the other. `lasts_s`: about how long the step after a moment takes, where known."""

    def __init__(
        self,
        engine: FaultedEngine,
        counts: StrikeCounts,
        events: RoundMoments,
        *,
        lasts_s: Mapping[str, float],
        round_s: float,
        lease_s: float,
        grace_s: float = 0.0,
    ) -> None:
        """`grace_s`: how long a publisher may take beyond its deadline to leave this kind of engine in order."""
        self._engine, self._counts, self._events, self._lasts_s = engine, counts, events, lasts_s
        self._round_s, self._lease_s, self._grace_s = round_s, lease_s, grace_s
        self._took_s: deque[float] = deque([0.2], maxlen=32)
        self._pause = threading.Event()

    @property
    def timeout_s(self) -> float:
        """How long a round may take: many times as long as a typical one."""
        return max(self._round_s, 20 * self.typical_s)

    @property
    def lease_s(self) -> float:
        """How long a vote lease lasts."""
        return max(self._lease_s, 10 * self.typical_s)

    @property
    def typical_s(self) -> float:
        """The median time of recent rounds."""
        return statistics.median(self._took_s)

    def strike(self, strike: Strike, order: Publish, trainer: TrainerProcess) -> int:
        """Let the trainer publish, and strike the round. Returns the struck process once the trainer's call has ended."""
        self._events.begin()
        trainer.begin(order)
        ended = self._until_moment(strike, trainer)
        moment = self._events.last
        pid = trainer.process.pid if strike.whom == "trainer" else self._engine.pid_of(strike)
        self._counts.note(strike, moment, hit=self._inject(strike, pid, trainer))
        self._settle(strike, order, trainer, ended)
        return pid

    def without_strike(self, order: Publish, trainer: TrainerProcess) -> str | None:
        """Run a round without a strike. Returns the code of its error, if it failed, and notes the message."""
        self._events.begin()
        trainer.begin(order)
        ended = self._end_of(order, trainer, None, 0.0)
        if ended is None:
            return "trainer exited"
        if ended.code is not None:
            self._counts.notes.append(f"round {order.label} failed without a strike: {ended.message}")
        return ended.code

    def _until_moment(self, strike: Strike, trainer: TrainerProcess) -> RoundResult | None:
        """Wait for the strike's moment, and a part of the time after it. Returns the round's result, if that comes first."""
        deadline = Deadline.after(self._round_s)
        while not self._events.seen(strike.after) and deadline.remaining_s() > 0:
            ended = trainer.ended(deadline.remaining_s(), [self._events.waker])
            if ended is not None or not trainer.alive:
                return ended
        lasts_s = {"publish": self.typical_s, **self._lasts_s}.get(strike.after, STEP_PART_S)
        pause = Deadline.after(max(0.0, strike.part - 0.25) * lasts_s)  # one strike in four falls at once
        while (ended := trainer.ended(pause.remaining_s())) is None and trainer.alive and not pause.over:
            pass
        return ended

    def _inject(self, strike: Strike, pid: int, trainer: TrainerProcess) -> bool:
        """Inject the fault. Returns whether there was anything to strike."""
        send = os.kill if strike.whom == "trainer" else self._engine.send
        try:
            match strike.kind:
                case "kill":
                    send(pid, signal.SIGKILL)
                case "corrupt":
                    return flip(pid, strike.number, spared=trainer.parameters)
                case "cut":
                    return cut(pid, strike.number)
                case "stop":
                    send(pid, signal.SIGSTOP)
                    if strike.stop_s is not None:
                        self._pause.wait(strike.stop_s)
                        send(pid, signal.SIGCONT)
        except ProcessLookupError:  # the process had exited by itself
            return False
        return True

    def _settle(
        self, strike: Strike, order: Publish, trainer: TrainerProcess, ended: RoundResult | None
    ) -> None:
        """Wait for the round's end. A trainer that is stopped without a limit is continued once the engine has given its round up."""
        if strike.kind == "kill" and strike.whom == "trainer":
            trainer.kill()
            self._counts.outcomes["trainer killed"] += 1
            return
        if strike.kind == "stop" and strike.whom == "trainer" and strike.stop_s is None:
            self._until_given_up(strike, order)
            with suppress(ProcessLookupError):
                os.kill(trainer.process.pid, signal.SIGCONT)
        if ended is None:
            ended = self._end_of(order, trainer, strike, strike.stop_s or 0.0)
        if ended is not None:
            self._counts.outcomes[ended.code or "committed"] += 1

    def _end_of(
        self, order: Publish, trainer: TrainerProcess, strike: Strike | None, stopped_s: float
    ) -> RoundResult | None:
        """Wait for the round's result. A trainer that does not report it in time counts as late, and is killed."""
        steps_s = last_steps_s(PublisherSettings(lease_s=order.lease_s), 1)
        deadline = Deadline.after(2 * order.timeout_s + steps_s + stopped_s + self._grace_s + SLACK_S)
        ended = None
        try:
            while ended is None and trainer.alive:
                ended = trainer.ended(deadline.remaining_s())
                if ended is None and trainer.alive:
                    deadline.check("a trainer's round to end")
        except DeadlineExceeded:
            self._note_late(strike, order, "the trainer's round did not end")
            trainer.kill()
        except LiveWeightError as error:  # the trainer itself failed
            self._counts.outcomes[error.code] += 1
        if ended is not None and ended.code is None:
            self._took_s.append(ended.took_s)
        return ended

    def _until_given_up(self, strike: Strike, order: Publish) -> None:
        """Wait until the engine has ended the round of a stopped trainer. Counts as late if it does not in time."""
        deadline = Deadline.after(order.timeout_s + order.lease_s + self._grace_s + SLACK_S)
        while not self._engine.idle():
            if deadline.remaining_s() == 0.0:
                self._note_late(strike, order, "the engine did not give a stopped trainer's round up")
                return
            self._pause.wait(POLL_S)

    def _note_late(self, strike: Strike | None, order: Publish, what: str) -> None:
        self._counts.late += 1
        at = "without a strike" if strike is None else str(strike)
        self._counts.notes.append(f"late at round {order.label}, {at}: {what}; {self._engine.describe()}")
