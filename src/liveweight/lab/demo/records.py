"""The records of a demo run, as frozen values. The view, the JSON lines and the report read them.

Times are seconds since the demo began; durations are in milliseconds.
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
"""The last steps whose mean is the result of a run: a single step is too noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The demo entered another phase. `detail` is text for the user."""

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
    """A replica has reached this stage of the current round."""

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
    """One replica's part in a round: when it reached each stage, in milliseconds since the round began, and what its ranks did."""

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
        """The longest pause of decoding on any replica."""
        return max((part.stall_ms for part in self.replicas), default=0.0)

    @property
    def staged_bytes(self) -> int:
        """The bytes that all ranks read."""
        return sum(rank.staged_bytes for part in self.replicas for rank in part.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFault:
    """A fault that the run survived: what was broken, the round's error, and how long until all replicas served again."""

    at_s: float
    step: int
    kind: FaultKind
    what: str
    said: str
    recovered_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Absolute differences between the engine's logprobs and the trainer's own, of the same tokens under the versions that drew them.

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
    """A step of training. `version` is the one that it made; `staleness` is its samples' age in versions; `dropped` groups were too old."""

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
"""Called with every record, on the thread that emits it, which may be any. Must be quick."""


def last_reward(steps: Sequence[TrainingStep]) -> float:
    """The mean reward of a run's last steps."""
    return statistics.fmean(step.reward for step in steps[-LAST_STEPS:])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 if there are none."""
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
