"""Chaos: what is broken in which step, and how. The plan is pure; breaking things is not.

Everything that is broken here is broken for real: a connection is closed, a deadline runs out, a process gets SIGKILL.
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
    """One thing to break: which, at which replica, and a choice of moments and ranks in `number`."""

    kind: FaultKind
    replica: int
    number: int


def plan(steps: int, replicas: int, seed: int) -> Mapping[int, PlannedFault]:
    """By step: every kind at least once if there are steps enough, in any order, never in the first or the last step."""
    chance = random.Random(f"{seed} chaos")
    count = max(0, min(steps - 2, max(len(KINDS), steps // 20)))
    chosen = sorted(chance.sample(range(2, steps), count)) if count else []
    kinds = [KINDS[at % len(KINDS)] for at in range(count)]
    chance.shuffle(kinds)
    return {
        step: PlannedFault(kind=kind, replica=chance.randrange(replicas), number=chance.randrange(1 << 16))
        for step, kind in zip(chosen, kinds, strict=True)
    }


def strike(
    blow: PlannedFault, version: int, rounds: TrainerRounds, servers: Sequence[EngineServer], stop: Stop
) -> tuple[str, list[DemoRound]]:
    """Break it in the middle of the round of that version: what was done, and what became of the round."""
    server, replica = servers[blow.replica], rounds.replicas[blow.replica]
    match blow.kind:
        case "cut":
            stage = CUTS[blow.number % len(CUTS)]
            replica.cut_after = stage
            ended = [rounds.publish(version)]
            replica.cut_after = None
            return f"the trainer's connection to replica {blow.replica} was cut after {stage}", ended
        case "deadline":
            with rounds.hurried(TOO_SHORT_S):
                return f"the round had {TOO_SHORT_S * 1e3:g} ms", [rounds.publish(version)]
        case "rank":
            rank = blow.number % server.tp
            rounds.begin(version)
            killed = server.kill_rank(rank)
            ended = rounds.finish()
            server.await_noticed(killed, stop, Deadline.after(NOTICE_S))
            return f"rank {rank} of replica {blow.replica} was killed", ended
        case _:
            rounds.begin(version)
            server.kill()
            return f"replica {blow.replica} was killed", rounds.finish()
