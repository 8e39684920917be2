"""The fault plan of --chaos, how a run is stopped, and how the trainer's policy keeps its versions."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch

from liveweight.cli.signals import stopped_by_signals
from liveweight.lab.demo.faults import KINDS, plan
from liveweight.lab.demo.learning.grpo import batch_of
from liveweight.lab.demo.learning.policy import Policy
from liveweight.lab.demo.learning.samples import Sample, SampleGroup
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.lab.demo.settings import Training
from liveweight.lab.demo.stopping import RunStopped, Stop
from tests.support.engine.engines import Models

torch.set_num_threads(1)


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 20, 100, 400])
@pytest.mark.parametrize("seed", range(5))
def test_chaos_spares_the_first_and_the_last_step_and_breaks_everything_once(steps: int, seed: int) -> None:
    faults = plan(steps, 3, seed)
    assert all(1 < step < steps for step in faults)
    assert faults == plan(steps, 3, seed)
    assert {fault.replica for fault in faults.values()} <= {0, 1, 2}
    if steps >= 6:
        assert {fault.kind for fault in faults.values()} == set(KINDS)
    assert len(faults) <= max(len(KINDS), steps // 20)


def test_plans_of_other_seeds_differ() -> None:
    assert plan(100, 2, 0) != plan(100, 2, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_run_without_interrupting_it(number: signal.Signals) -> None:
    called = threading.Event()
    before = signal.getsignal(number)
    with Stop() as stop:
        stop.call(called.set)
        with stopped_by_signals(stop):
            os.kill(os.getpid(), number)  # would end the test, or raise, anywhere
            assert called.wait(60)
            with pytest.raises(RunStopped):
                stop.wait(60)
        assert signal.getsignal(number) is before
        late = threading.Event()
        stop.call(late.set)
        assert late.is_set()


def test_warming_up_lowers_the_loss_and_versions_are_kept_apart(models: Models) -> None:
    policy, task, chance = Policy(models.directory(), Training(), keep=2), SortDigits(), random.Random(0)
    losses = [policy.imitate(task, chance) for _ in range(12)]
    assert losses[-1] < losses[0]
    warm = policy.weights()
    sample = Sample(prompt=(10, 11), tokens=(12, 13), logprobs=(-1.0, -2.0), versions=(0, 0), reward=1.0)
    other = Sample(prompt=(10, 11), tokens=(14,), logprobs=(-3.0,), versions=(0,), reward=0.0)
    batch = batch_of([sample, other])
    policy.begin_rl()
    policy.keep(0)
    before = policy.logprobs(batch).detach()
    policy.learn([SampleGroup(question="1=", samples=(sample, other))], done=0.0)
    after = policy.logprobs(batch).detach()
    assert (after[0, :2] > before[0, :2]).all()  # what was rewarded became likelier
    assert after[1, 0] < before[1, 0]
    assert torch.equal(policy.logprobs(batch, 0).detach(), before)
    policy.keep(1)
    policy.keep(2)
    assert policy.kept() == {1, 2}
    policy.restore(warm)
    assert torch.equal(policy.logprobs(batch).detach(), before)
    assert policy.kept() == frozenset()


def test_the_learning_rate_falls_to_its_end(models: Models) -> None:
    policy = Policy(models.directory(), Training(rate=1.0, rate_end=0.2), keep=1)
    assert [policy.rate_at(done) for done in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.6, 0.2])
