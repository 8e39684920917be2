"""A round that is struck: begun by a trainer, hit at its moment, and ended in the time that it has. Whatever the engine is."""

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

LOOK_S = 0.005
STEP_PART_S = 0.004
"""About how long the steps after staging take."""


class FaultedRound(Protocol):
    """The engine whose rounds are struck. For the torture's thread."""

    def pid_of(self, strike: Strike) -> int:
        """The process that is meant, if it is not the trainer."""

    def send(self, pid: int, number: signal.Signals) -> None:
        """A signal to that process of it; ProcessLookupError if it has ended."""

    def idle(self) -> bool:
        """Whether it serves, and no round is open."""

    def said(self) -> str:
        """What it says of itself, for notes."""


class FaultedRounds:
    """One round after the other. `lasts_s`: about how long what follows a moment takes, where that is known."""

    def __init__(
        self,
        engine: FaultedRound,
        counts: StrikeCounts,
        events: RoundMoments,
        *,
        lasts_s: Mapping[str, float],
        round_s: float,
        lease_s: float,
        grace_s: float = 0.0,
    ) -> None:
        """`grace_s`: what a publisher may take beyond its deadline to put this kind of engine right."""
        self._engine, self._counts, self._events, self._lasts_s = engine, counts, events, lasts_s
        self._round_s, self._lease_s, self._grace_s = round_s, lease_s, grace_s
        self._took_s: deque[float] = deque([0.2], maxlen=32)
        self._pause = threading.Event()

    @property
    def timeout_s(self) -> float:
        """What a round may take: long enough beside those before it."""
        return max(self._round_s, 20 * self.typical_s)

    @property
    def lease_s(self) -> float:
        """What a yes may hold."""
        return max(self._lease_s, 10 * self.typical_s)

    @property
    def typical_s(self) -> float:
        """What rounds took."""
        return statistics.median(self._took_s)

    def strike(self, strike: Strike, order: Publish, trainer: TrainerProcess) -> int:
        """Let the trainer publish, and strike that. No call of the trainer is under way on return; the process that was struck."""
        self._events.begin()
        trainer.begin(order)
        ended = self._until_moment(strike, trainer)
        moment = self._events.last
        pid = trainer.process.pid if strike.whom == "trainer" else self._engine.pid_of(strike)
        self._counts.note(strike, moment, hit=self._blow(strike, pid, trainer))
        self._settle(strike, order, trainer, ended)
        return pid

    def undisturbed(self, order: Publish, trainer: TrainerProcess) -> str | None:
        """A round that nobody strikes; the code that it failed with, whose words are noted."""
        self._events.begin()
        trainer.begin(order)
        ended = self._end_of(order, trainer, None, 0.0)
        if ended is None:
            return "ended without a word"
        if ended.code is not None:
            self._counts.notes.append(f"round {order.label}, which nobody struck, failed: {ended.said}")
        return ended.code

    def _until_moment(self, strike: Strike, trainer: TrainerProcess) -> RoundResult | None:
        """Wait for what the strike waits for, and a part of the time after it; the round's end, if that comes first."""
        deadline = Deadline.after(self._round_s)
        while not self._events.seen(strike.after) and deadline.remaining_s() > 0:
            ended = trainer.ended(deadline.remaining_s(), [self._events.waker])
            if ended is not None or not trainer.alive:
                return ended
        lasts_s = {"publish": self.typical_s, **self._lasts_s}.get(strike.after, STEP_PART_S)
        wanted = Deadline.after(max(0.0, strike.part - 0.25) * lasts_s)  # one in four at once
        while (ended := trainer.ended(wanted.remaining_s())) is None and trainer.alive and not wanted.over:
            pass
        return ended

    def _blow(self, strike: Strike, pid: int, trainer: TrainerProcess) -> bool:
        """Do it; whether there was anything to strike."""
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
        except ProcessLookupError:  # it had ended by itself
            return False
        return True

    def _settle(
        self, strike: Strike, order: Publish, trainer: TrainerProcess, ended: RoundResult | None
    ) -> None:
        """The round's end, in the time that it has. One who never wakes up by itself is woken when the engine has given it up."""
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
        """How a round ended. A trainer that does not say so in time is late, and killed."""
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
        except LiveWeightError as error:  # the trainer's last word
            self._counts.outcomes[error.code] += 1
        if ended is not None and ended.code is None:
            self._took_s.append(ended.took_s)
        return ended

    def _until_given_up(self, strike: Strike, order: Publish) -> None:
        """Until the engine has ended a round whose trainer stands still: late, if it does not in the time that the round has."""
        deadline = Deadline.after(order.timeout_s + order.lease_s + self._grace_s + SLACK_S)
        while not self._engine.idle():
            if deadline.remaining_s() == 0.0:
                self._note_late(strike, order, "the engine did not give a stopped trainer's round up")
                return
            self._pause.wait(LOOK_S)

    def _note_late(self, strike: Strike | None, order: Publish, what: str) -> None:
        self._counts.late += 1
        at = "undisturbed" if strike is None else str(strike)
        self._counts.notes.append(f"late at round {order.label}, {at}: {what}; {self._engine.said()}")
