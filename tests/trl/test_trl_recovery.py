"""Engines and ranks are lost while a trainer uses them: rollouts are exact, or they are refused and asked for again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from liveweight.errors import DeadlineExceeded, LiveWeightError
from liveweight.integrations.trl import attach
from tests.trl.harness import ServedEngine, logged, logprobs, make_trainer

PROMPTS = [[token, 7] for token in range(5, 13) for _ in range(4)]


@pytest.fixture(scope="module")
def mortal_engine(model: Path, place: Path) -> Iterator[ServedEngine]:
    """One engine for all tests here."""
    with ServedEngine(model, place, "--restart-ranks") as started:
        yield started


@pytest.fixture
def own_engine(mortal_engine: ServedEngine) -> ServedEngine:
    """An engine to be killed, which starts ranks again. It serves when a test begins, whatever the test before left."""
    if not mortal_engine.running:
        mortal_engine.start()
    return mortal_engine


def change(trainer: Any) -> None:
    """Give the trainer other weights than those that engines start with."""
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)


def exact(trainer: Any, answered: Any) -> bool:
    """Whether all answers were drawn by the trainer's weights."""
    prompts, answers, found, _ = answered
    return all(
        torch.allclose(
            torch.tensor(given)[:, 0], logprobs(trainer.model, prompt, answer, 1.0), rtol=0, atol=1e-4
        )
        for prompt, answer, given in zip(prompts, answers, found, strict=True)
    )


def test_an_engine_that_was_started_again_gets_the_version_before_it_is_used(
    model: Path, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path)
    change(trainer)
    with attach(trainer, engines=[own_engine.url]):
        trainer.vllm_generation.sync_weights()
        own_engine.restart()
        assert own_engine.weights()["version"]["label"] == "initial"
        answered = trainer.vllm_generation.generate(PROMPTS, None, 4)
        assert exact(trainer, answered)
        assert own_engine.weights()["version"]["label"] == "step_0"
        counted = trainer._metrics["eval"]  # the model was not put into training mode
        assert counted["rollouts/refused"][-1] > 0  # it answered with `initial`, and was not believed


def test_an_engine_that_is_killed_and_comes_back_later_is_waited_for(
    model: Path, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path)
    change(trainer)
    with attach(trainer, engines=[own_engine.url]):
        trainer.vllm_generation.sync_weights()
        own_engine.kill()
        later = threading.Thread(target=own_engine.start)
        later.start()
        answered = trainer.vllm_generation.generate(PROMPTS, None, 4)
        later.join()
        assert exact(trainer, answered)


def test_a_rank_that_was_killed_is_replaced_and_training_goes_on(
    model: Path, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=4)
    kills = iter([True, False, True])

    def reward(completions: list[str], **_: object) -> list[float]:
        if next(kills, False):
            own_engine.kill_rank()
        return [float(len(text)) for text in completions]

    trainer.reward_funcs = [reward]
    with attach(trainer, engines=[own_engine.url]) as attached:
        trainer.train()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is True
    assert len(logged(trainer, "reward")) == 4
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_a_dead_engine_is_left_out_where_a_quorum_is_enough(
    model: Path, engine: ServedEngine, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=3)
    with attach(trainer, engines=[own_engine.url, engine.url], quorum=1) as attached:
        trainer.vllm_generation.sync_weights()
        own_engine.kill()
        assert exact(trainer, trainer.vllm_generation.generate(PROMPTS, None, 4))
        trainer.train()
        assert attached.report is not None
        assert list(attached.report.behind) == [own_engine.url]
        own_engine.start()
        attached.weights_changed()
        trainer.vllm_generation.sync_weights()
        assert not attached.report.behind
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_without_a_quorum_an_engine_that_stays_dead_fails_the_training_in_time(
    model: Path, engine: ServedEngine, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=3)
    with attach(trainer, engines=[own_engine.url, engine.url], recover_s=2.0):
        trainer.vllm_generation.sync_weights()
        own_engine.kill()
        assert exact(trainer, trainer.vllm_generation.generate(PROMPTS, None, 4))  # the other one serves
        with pytest.raises(LiveWeightError, match=own_engine.url):
            trainer.train()


def test_if_no_engine_comes_back_the_error_says_what_was_waited_for(
    model: Path, own_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path)
    with attach(trainer, engines=[own_engine.url], recover_s=1.0):
        trainer.vllm_generation.sync_weights()
        own_engine.kill()
        with pytest.raises(DeadlineExceeded, match=f"an engine to serve step_0: {own_engine.url}"):
            trainer.vllm_generation.generate(PROMPTS, None, 4)


def test_a_second_publisher_is_noticed_and_its_answers_are_refused(
    model: Path, own_engine: ServedEngine, tmp_path: Path
) -> None:
    """Somebody else publishes into the engine between our publish and our rollouts, under the same label."""
    import liveweight as lw

    trainer = make_trainer(model, tmp_path)
    change(trainer)
    with attach(trainer, engines=[own_engine.url]):
        trainer.vllm_generation.sync_weights()
        with lw.Publisher(model, engines=[own_engine.url]) as other:
            other.publish("step_0")
        answered = trainer.vllm_generation.generate(PROMPTS, None, 4)
        assert exact(trainer, answered)
