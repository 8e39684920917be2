"""What a run says of itself, once, as frozen values. The view, the JSON lines and the report are readers of them.

Times are seconds since the demo began; durations are in milliseconds, as people read them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Run: TypeAlias = Literal["live", "control"]
PhaseName: TypeAlias = Literal["start", "warmup", "live", "control", "end"]
Stage: TypeAlias = Literal["open", "stage", "verify", "vote", "commit"]
STAGES: tuple[Stage, ...] = ("open", "stage", "verify", "vote", "commit")
FaultKind: TypeAlias = Literal["cut", "deadline", "rank", "replica", "unplanned"]
LAST_STEPS = 10
"""So many steps are the end of a run: a single one is too noisy to be its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The demo went on to something else. `detail` is for people."""

    at_s: float
    name: PhaseName
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """A step of the warm-up."""

    at_s: float
    step: int
    steps: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReached:
    """A replica has come that far in the present round."""

    at_s: float
    version: int
    replica: int
    stage: Stage
    took_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank did in a round, by its own clock."""

    rank: int
    stage_ms: float
    verify_ms: float
    swap_ms: float
    staged_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPart:
    """One replica's part of a round: when it had come how far, in milliseconds since the round began, and what its ranks did."""

    replica: int
    committed: bool
    stall_ms: float
    reached_ms: tuple[tuple[Stage, float], ...]
    ranks: tuple[RankPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRound:
    """A round that ended. `problem` None: the fleet serves the version."""

    began_s: float
    version: int
    total_ms: float
    freeze_ms: float
    size_bytes: int
    replicas: tuple[ReplicaPart, ...]
    problem: str | None = None

    @property
    def stall_ms(self) -> float:
        """How long decoding stood still, where it did longest."""
        return max((part.stall_ms for part in self.replicas), default=0.0)

    @property
    def staged_bytes(self) -> int:
        """What all ranks read."""
        return sum(rank.staged_bytes for part in self.replicas for rank in part.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFault:
    """Something was broken, and the run went on: what it was, what the round said of it, and how long until all served again."""

    at_s: float
    step: int
    kind: FaultKind
    what: str
    said: str
    recovered_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The engine's logprobs beside the trainer's own, of the same tokens under the versions that drew them: absolute differences.

    `after` is of tokens that followed a commit inside their answer, where the KV policy shows.
    """

    tokens: int = 0
    mean: float = 0.0
    worst: float = 0.0
    after_tokens: int = 0
    after_mean: float = 0.0
    after_worst: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """A step of training. `version` is what it made; `staleness` is of its samples, in versions; `dropped` groups were too old."""

    at_s: float
    run: Run
    step: int
    version: int
    reward: float
    loss: float
    staleness_mean: float
    staleness_worst: int
    samples: int
    crossed: int
    dropped: int
    tokens_per_s: float
    gap: Gap
    rounds: tuple[DemoRound, ...] = ()
    faults: tuple[DemoFault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole demo in numbers. `control_*` are None where no control run was made."""

    seed: int
    mode: str
    kv_policy: str
    replicas: int
    steps: int
    reward_first: float
    reward_last: float
    control_reward_first: float | None
    control_reward_last: float | None
    rounds: int
    rounds_failed: int
    stall_ms_p50: float
    stall_ms_p99: float
    faults_survived: int
    crossed: int
    dropped: int
    staleness_worst: int
    gap_mean: float
    gap_worst: float
    gap_after_mean: float
    gap_after_worst: float
    published_bytes: int
    took_s: float


Record: TypeAlias = Phase | Warmed | StepReached | TrainingStep | Summary
Listener: TypeAlias = Callable[[Record], None]
"""Hears every record, on the thread that says it, which may be any. Must be quick."""


def last_reward(steps: Sequence[TrainingStep]) -> float:
    """The mean reward of a run's last steps."""
    return statistics.fmean(step.reward for step in steps[-LAST_STEPS:])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, -int(-len(values) * share // 1) - 1)]


def summarise(
    steps: Sequence[TrainingStep], *, seed: int, mode: str, kv_policy: str, replicas: int, took_s: float
) -> Summary:
    """The demo's numbers from its steps, of both runs."""
    live = [step for step in steps if step.run == "live"]
    control = [step for step in steps if step.run == "control"]
    rounds = [one for step in live for one in step.rounds]
    done = [one for one in rounds if one.problem is None]
    stalls = [part.stall_ms for one in done for part in one.replicas]
    gaps = [step.gap for step in live]
    return Summary(
        seed=seed,
        mode=mode,
        kv_policy=kv_policy,
        replicas=replicas,
        steps=len(live),
        reward_first=live[0].reward,
        reward_last=last_reward(live),
        control_reward_first=control[0].reward if control else None,
        control_reward_last=last_reward(control) if control else None,
        rounds=len(done),
        rounds_failed=len(rounds) - len(done),
        stall_ms_p50=percentile(stalls, 0.5),
        stall_ms_p99=percentile(stalls, 0.99),
        faults_survived=sum(len(step.faults) for step in live),
        crossed=sum(step.crossed for step in live),
        dropped=sum(step.dropped for step in live),
        staleness_worst=max(step.staleness_worst for step in live),
        gap_mean=_mean([(gap.mean, gap.tokens) for gap in gaps]),
        gap_worst=max(gap.worst for gap in gaps),
        gap_after_mean=_mean([(gap.after_mean, gap.after_tokens) for gap in gaps]),
        gap_after_worst=max(gap.after_worst for gap in gaps),
        published_bytes=sum(one.staged_bytes for one in done),
        took_s=took_s,
    )


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else 0.0
