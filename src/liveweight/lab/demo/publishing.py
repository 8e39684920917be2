"""Publishes step after step, whatever happens: begins rounds, injects the planned faults, recovers from failures, and records them.

A failed round costs nothing but a version: the engines go on with the weights they have. An engine replaces a killed rank by itself. An
engine that exited is restarted here, and rounds are repeated until the whole fleet serves the trainer's weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from liveweight.lab.demo.engine_servers import EngineServer
from liveweight.lab.demo.faults import PlannedFault, inject
from liveweight.lab.demo.records import DemoFault, DemoRound, FaultKind
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.trainer_rounds import TrainerRounds
from liveweight.spec.deadline import Deadline

RECOVER_S = 600.0
AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The result of publishing in one step: the rounds that ended in it, and the faults that the run survived."""

    rounds: tuple[DemoRound, ...] = ()
    faults: tuple[DemoFault, ...] = ()


@dataclass(slots=True, kw_only=True)
class StepPublisher:
    """Publishes the steps of one run. For the trainer's thread."""

    rounds: TrainerRounds
    servers: Sequence[EngineServer]
    planned: Mapping[int, PlannedFault]
    stop: Stop
    since_s: float
    _ended: list[DemoRound] = field(default_factory=list)
    _faults: list[DemoFault] = field(default_factory=list)

    def recover_engines(self, version: int) -> bool:
        """Called while the trainer waits for rollouts: restart an engine that exited by itself, and publish that version's weights, which
        the trainer still has. Returns whether there was one."""
        gone = [server.number for server in self.servers if server.ended]
        if gone:
            what = f"replica {', '.join(map(str, gone))} ended by itself"
            self._recover(version, "unplanned", what, self.rounds.finish(), time.monotonic())
        return bool(gone)

    def after(self, step: int, last: bool) -> Published:
        """Begin the round of this step's weights, after the round before has ended. The last step's round has ended on return."""
        before = self.rounds.finish()
        if any(one.problem is not None for one in before):
            self._recover(step, "unplanned", "a round failed", before, time.monotonic())
        elif step in self.planned:
            self._ended += before
            self._inject(step, self.planned[step])
        else:
            self._ended += before
            self.rounds.begin(step)
        if last:
            self._ended += self.rounds.finish()
        published = Published(rounds=tuple(self._ended), faults=tuple(self._faults))
        self._ended, self._faults = [], []
        return published

    def _inject(self, step: int, fault: PlannedFault) -> None:
        began_s = time.monotonic()
        what, ended = inject(fault, step, self.rounds, self.servers, self.stop)
        self._recover(step, fault.kind, what, ended, began_s)

    def _recover(self, step: int, kind: FaultKind, what: str, ended: list[DemoRound], began_s: float) -> None:
        """Restart engines that exited, and publish until the whole fleet serves these weights."""
        problem = next(
            (one.problem for one in ended if one.problem is not None),
            "no round was open, or it was committed",
        )
        deadline = Deadline.after(RECOVER_S)
        while True:
            for server in self.servers:
                if server.ended:
                    server.restart(self.stop, deadline)
            ended.append(again := self.rounds.publish(step))
            if again.problem is None:
                break
            if deadline.over:
                raise deadline.exceeded(f"the fleet to serve version {step}: {again.problem}")
            self.stop.wait(AGAIN_S)
        took_ms = (time.monotonic() - began_s) * 1e3
        self._ended += ended
        self._faults.append(
            DemoFault(
                at_s=began_s - self.since_s,
                step=step,
                kind=kind,
                what=what,
                said=problem,
                recovered_ms=took_ms,
            )
        )
