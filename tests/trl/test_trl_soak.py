"""Whole training runs: rewards rise on every seed, and no fault of an engine lets a rollout of other weights in."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from liveweight.integrations.trl import attach
from tests.trl.harness import ServedEngine, logged, make_trainer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

LEARNING: dict[str, Any] = {
    "max_steps": 40,
    "per_device_train_batch_size": 64,
    "num_generations": 16,
    "max_completion_length": 16,
}
DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_reward_rises_above_seven_tenths_within_forty_steps(
    model: Path, engine: ServedEngine, tmp_path: Path, kind: str, seed: int
) -> None:
    trainer = make_trainer(model, tmp_path, kind=kind, seed=seed, **LEARNING)
    with attach(trainer, engines=[engine.url]) as attached:
        trainer.train()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is True
    assert max(logged(trainer, "reward")) > 0.7
    if kind == "grpo":  # RLOO computes its own logprobs, and compares nothing
        assert max(logged(trainer, DIFFERENCE)) < 1e-4
        assert min(logged(trainer, "sampling/importance_sampling_ratio/min")) > 1 - 1e-3
        assert max(logged(trainer, "sampling/importance_sampling_ratio/max")) < 1 + 1e-3


def test_training_outlives_three_killed_engines_and_six_killed_ranks(
    model: Path, place: Path, tmp_path: Path
) -> None:
    """Faults come at random moments, while rollouts are drawn and while weights are published. TRL compares every token's logprob with that
    of its own weights: an answer of other weights would show."""
    trainer = make_trainer(model, tmp_path, **{**LEARNING, "max_steps": 60})
    faults = ["engine"] * 3 + ["rank"] * 6
    chance = random.Random(7)
    chance.shuffle(faults)
    ended = threading.Event()
    done: list[str] = []
    steps = threading.Semaphore(0)
    with ServedEngine(model, place, "--tp", "2", "--restart-ranks") as own:

        def reward(completions: list[str], **_: object) -> list[float]:
            steps.release()
            return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in completions]

        def break_things() -> None:
            for fault in faults:
                for _ in range(4):  # some steps between two faults
                    steps.acquire()
                if ended.wait(chance.uniform(0.0, 0.3)):
                    return
                if fault == "engine":
                    own.restart()
                else:
                    own.kill_rank(chance.randrange(2))
                done.append(fault)

        trainer.reward_funcs = [reward]
        breaking = threading.Thread(target=break_things)
        breaking.start()
        try:
            with attach(trainer, engines=[own.url], recover_s=120.0) as attached:
                trainer.train()
                assert attached.publisher is not None
                assert attached.publisher.verify().match is True
        finally:
            ended.set()
            steps.release(1000)
            breaking.join()
    assert sorted(done) == sorted(faults)
    assert len(logged(trainer, "reward")) == 60
    assert max(logged(trainer, DIFFERENCE)) < 1e-4
    assert max(logged(trainer, "reward")) > 0.7
