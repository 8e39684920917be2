"""The faults of `demo --chaos`: which fault in which step, and how it is injected. The plan is pure; injecting is not.

All faults are real: a connection is closed, a deadline runs out, a process gets SIGKILL.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from liveweight.lab.demo.engine_servers import EngineServer
from liveweight.lab.demo.records import DemoRound, FaultKind, Stage
from liveweight.lab.demo.stopping import Stop
from liveweight.lab.demo.trainer_rounds import TrainerRounds
from liveweight.spec.deadline import Deadline

KINDS: tuple[FaultKind, ...] = ("cut", "deadline", "rank", "replica")
CUTS: tuple[Stage, ...] = ("open", "stage", "verify", "vote", "commit")
TOO_SHORT_S = 0.0005
NOTICE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault: its kind, its replica, and a number that chooses among moments and ranks."""

    kind: FaultKind
    replica: int
    number: int


def plan(steps: int, replicas: int, seed: int) -> Mapping[int, PlannedFault]:
    """Faults by step: every kind at least once if there are enough steps, in random order, never in the first or the last step."""
    chance = random.Random(f"{seed} chaos")
    count = max(0, min(steps - 2, max(len(KINDS), steps // 20)))
    chosen = sorted(chance.sample(range(2, steps), count)) if count else []
    kinds = [KINDS[at % len(KINDS)] for at in range(count)]
    chance.shuffle(kinds)
    return {
        step: PlannedFault(kind=kind, replica=chance.randrange(replicas), number=chance.randrange(1 << 16))
        for step, kind in zip(chosen, kinds, strict=True)
    }


def inject(
    fault: PlannedFault, version: int, rounds: TrainerRounds, servers: Sequence[EngineServer], stop: Stop
) -> tuple[str, list[DemoRound]]:
    """Inject a fault into the round of that version. Returns what was done, and how the round ended."""
    server, replica = servers[fault.replica], rounds.replicas[fault.replica]
    match fault.kind:
        case "cut":
            stage = CUTS[fault.number % len(CUTS)]
            replica.cut_after = stage
            ended = [rounds.publish(version)]
            replica.cut_after = None
            return f"the trainer's connection to replica {fault.replica} was cut after {stage}", ended
        case "deadline":
            with rounds.hurried(TOO_SHORT_S):
                return f"the round had {TOO_SHORT_S * 1e3:g} ms", [rounds.publish(version)]
        case "rank":
            rank = fault.number % server.tp
            rounds.begin(version)
            killed = server.kill_rank(rank)
            ended = rounds.finish()
            server.await_noticed(killed, stop, Deadline.after(NOTICE_S))
            return f"rank {rank} of replica {fault.replica} was killed", ended
        case _:
            rounds.begin(version)
            server.kill()
            return f"replica {fault.replica} was killed", rounds.finish()
