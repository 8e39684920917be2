"""The on-policy check of the demo's trainer: what it finds of engines that serve what they say, and of one that does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from liveweight.engine.engine import Engine
from liveweight.lab.demo.learning.on_policy_check import gap, to_check
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.rollout_client import Completions
from liveweight.lab.demo.learning.samples import Sample, SampleGroup, read, request
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.lab.demo.records import Gap
from liveweight.lab.demo.settings import Training
from liveweight.wire.messages.values import KvPolicy
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.http_server import serving
from tests.support.processes.real_servers import until

Start = Callable[..., Engine]
ROUNDING = 1e-4
"""What sums in another order may differ by; logprobs here are around 6."""
LARGE = 1e-2
GROUP = 8
torch.set_num_threads(1)


def policy_on(directory: Path) -> Policy:
    policy = Policy(directory, Training(), keep=4)
    policy.keep(0)
    return policy


def move(policy: Policy, seed: int) -> None:
    """Change every weight a little, as a few hundred steps would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in policy.model.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=generator)


def rollouts(url: str, task: SortDigits, questions: Sequence[str]) -> list[SampleGroup]:
    client = Completions()
    try:
        return read(
            client.complete(url, request(questions, task, group=GROUP)).body, questions, task, group=GROUP
        )
    finally:
        client.close()


def samples_of(groups: Sequence[SampleGroup]) -> list[Sample]:
    return to_check(groups, 1000)


def test_of_an_engine_that_serves_what_it_says_only_rounding_differs(
    start: Start, publisher: Any, models: Models
) -> None:
    engine, policy = start(models.directory(), tp=2), policy_on(models.directory())
    source = publisher(engine, policy.model)
    with serving(engine) as served:
        for version in (0, 1):
            if version:
                move(policy, seed=version)
                policy.keep(version)
            source.publish(version)
            found = gap(policy, samples_of(rollouts(served.url, SortDigits(), ["314159=", "271828="])))
            assert found.tokens > 2 * GROUP
            assert found.worst < ROUNDING


def test_a_stale_engine_shows(start: Start, publisher: Any, models: Models) -> None:
    engine, policy = start(models.directory(), tp=2), policy_on(models.directory())
    stale = publisher(
        engine, policy_on(models.directory()).model
    )  # its loop never sees what the trainer learns
    with serving(engine) as served:
        stale.publish(0)
        move(policy, seed=1)
        policy.keep(1)
        stale.publish(1)  # the engine serves what it was sent, verified, and calls it 1
        samples = samples_of(rollouts(served.url, SortDigits(), ["314159=", "271828="]))
    assert {version for sample in samples for version in sample.versions} == {1}
    assert gap(policy, samples).mean > LARGE


class Crossing:
    """Long answers that are paused in their middle while a round commits."""

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine, self._task = engine, SortDigits(digits=300)
        self._pool = ThreadPoolExecutor(1)
        self._questions = ["1" * 300 + "="]
        self._asked: Future[list[SampleGroup]] = self._pool.submit(rollouts, url, self._task, self._questions)

    def until_halfway(self) -> None:
        until(lambda: self._engine.status().counts.generated_tokens > 4 * GROUP, "answers that have begun")
        self._engine.pause("keep", WITHIN_S)

    def samples(self) -> list[Sample]:
        self._engine.resume()
        groups = self._asked.result(WITHIN_S)
        self._pool.shutdown()
        return samples_of(groups)


def crossed_gap(engine: Engine, policy: Policy, source: Any, kv_policy: KvPolicy) -> tuple[Gap, list[Sample]]:
    with serving(engine) as served:
        source.publish(0)
        crossing = Crossing(engine, served.url)
        crossing.until_halfway()
        move(policy, seed=1)
        policy.keep(1)
        source.publish(1)
        samples = crossing.samples()
    assert any(sample.crossed for sample in samples), kv_policy
    return gap(policy, samples), samples


@pytest.mark.parametrize("kv_policy", ["recompute", "reuse"])
def test_after_a_commit_inside_an_answer_the_gap_is_the_kv_policys(
    start: Start, publisher: Any, models: Models, kv_policy: KvPolicy
) -> None:
    engine, policy = start(models.directory(), tp=2), policy_on(models.directory())
    found, samples = crossed_gap(
        engine, policy, publisher(engine, policy.model, kv_policy=kv_policy), kv_policy
    )
    assert found.after_tokens > 0
    assert any(sample.reused for sample in samples) == (kv_policy == "reuse")
    if kv_policy == "recompute":
        assert found.worst < ROUNDING
    else:
        assert found.after_worst > LARGE


def test_those_that_crossed_a_commit_are_checked_first() -> None:
    def sample(*versions: int) -> Sample:
        return Sample(prompt=(1,), tokens=(2, 3), logprobs=(-1.0, -1.0), versions=versions, reward=0.0)

    group = SampleGroup(question="1=", samples=(sample(0, 0), sample(0, 1), sample(1, 1)))
    assert [one.versions for one in to_check([group], 2)] == [(0, 1), (0, 0)]
