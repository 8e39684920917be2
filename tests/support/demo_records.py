"""Records of a demo that never ran, for those who read them."""

from __future__ import annotations

from dataclasses import replace

from liveweight.lab.demo.demo import DemoOutcome
from liveweight.lab.demo.records import (
    DemoFault,
    DemoRound,
    Gap,
    RankPart,
    ReplicaPart,
    Run,
    TrainingStep,
    summarise,
)
from liveweight.lab.demo.settings import DemoSettings


def rank(number: int) -> RankPart:
    """What a rank did."""
    return RankPart(rank=number, stage_ms=1.5, verify_ms=0.5, swap_ms=0.25, staged_bytes=1000 + number)


def round_of(version: int, *, stall_ms: float, problem: str | None = None) -> DemoRound:
    """A round of one replica with two ranks."""
    done = problem is None
    part = ReplicaPart(
        replica=0,
        committed=done,
        stall_ms=stall_ms if done else 0.0,
        reached_ms=(("open", 1.0), ("stage", 3.0), ("verify", 4.0), ("vote", 5.0), ("commit", 9.0)),
        ranks=(rank(0), rank(1)) if done else (),
    )
    return DemoRound(
        began_s=float(version),
        version=version,
        total_ms=10.0 + version,
        freeze_ms=0.5,
        size_bytes=2001,
        replicas=(part,),
        problem=problem,
    )


def step_of(number: int, reward: float, *, run: Run = "live") -> TrainingStep:
    """A step, with a round if its run publishes."""
    rounds = (round_of(number, stall_ms=number / 2),) if run == "live" else ()
    gap = Gap(tokens=10, mean=1e-7, worst=number * 1e-7, after_tokens=4, after_mean=2e-7, after_worst=3e-7)
    return TrainingStep(
        at_s=float(number),
        run=run,
        step=number,
        version=number,
        reward=reward,
        loss=0.1,
        staleness_mean=1.0,
        staleness_worst=2,
        samples=8,
        crossed=3,
        dropped=1,
        tokens_per_s=100.0,
        gap=gap,
        rounds=rounds,
    )


def outcome(*, faults: bool = False, control: bool = True) -> DemoOutcome:
    """A demo of twelve steps, and as many of its control run."""
    steps = [step_of(number, number / 12) for number in range(1, 13)]
    if faults:
        failed = round_of(5, stall_ms=0.0, problem="LW-205 <cut> & gone")
        fault = DemoFault(
            at_s=5.0,
            step=5,
            kind="cut",
            what="a <connection> was cut",
            said="LW-205 gone",
            recovered_ms=1500.0,
        )
        steps[4] = replace(steps[4], rounds=(failed, *steps[4].rounds), faults=(fault,))
    if control:
        steps += [step_of(number, 0.1, run="control") for number in range(1, 13)]
    summary = summarise(steps, seed=3, mode="ipc", kv_policy="recompute", replicas=1, took_s=60.0)
    return DemoOutcome(steps=tuple(steps), summary=summary)


SETTINGS = DemoSettings(seed=3, steps=12)
