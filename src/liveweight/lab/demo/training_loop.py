"""The RL loop of one run, live or control: take rollouts, learn, publish, repeat.

The trainer does not wait for a round until it has learned the next step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from liveweight.lab.demo.learning.on_policy_check import gap, to_check
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.rollouts import Rollouts, StepSamples
from liveweight.lab.demo.publishing import Published
from liveweight.lab.demo.records import DemoRound, Listener, Run, TrainingStep
from liveweight.lab.demo.stopping import Stop

Publish: TypeAlias = Callable[[int, bool], Published]
"""(step, whether it is the last) -> what ended meanwhile. Publishes the current weights as that step's; the control run does not."""

RecoverEngines: TypeAlias = Callable[[int], bool]
"""(the current version) -> whether an engine had exited and was restarted. Called while the trainer waits for rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """One run. For the trainer's thread."""

    run: Run
    steps: int
    policy: Policy
    rollouts: Rollouts
    publish: Publish
    recover: RecoverEngines
    stop: Stop
    emit: Listener
    since_s: float

    def go(self, first: Sequence[DemoRound] = ()) -> list[TrainingStep]:
        """Run all steps; emits each when it is done. `first` are the rounds that published the warm-up's weights."""
        done: list[TrainingStep] = []
        since_s = time.monotonic()
        for step in range(1, self.steps + 1):
            self.stop.check()
            taken = self.rollouts.take(
                self.policy.training.prompts, step - 1, functools.partial(self.recover, step - 1)
            )
            took_s, since_s = time.monotonic() - since_s, time.monotonic()
            record = self._learn(step, taken, took_s, first if step == 1 else ())
            done.append(record)
            self.emit(record)
        return done

    def _learn(
        self, step: int, taken: StepSamples, took_s: float, first: Sequence[DemoRound]
    ) -> TrainingStep:
        """One step: learn from these groups, and publish the result as a version."""
        loss = self.policy.learn(taken.groups, done=(step - 1) / self.steps)
        found = gap(self.policy, to_check(taken.groups, self.policy.training.checked))
        self.policy.keep(step)
        published = self.publish(step, step == self.steps)
        samples = [sample for group in taken.groups for sample in group.samples]
        ages = [step - 1 - sample.oldest for sample in samples]
        return TrainingStep(
            at_s=time.monotonic() - self.since_s,
            run=self.run,
            step=step,
            version=step,
            reward=statistics.fmean(sample.reward for sample in samples),
            loss=loss,
            staleness_mean=statistics.fmean(ages),
            staleness_worst=max(ages),
            samples=len(samples),
            crossed=sum(sample.crossed for sample in samples),
            dropped=taken.dropped,
            tokens_per_s=taken.tokens / max(took_s, 1e-6),
            gap=found,
            rounds=(*first, *published.rounds),
            faults=published.faults,
        )
