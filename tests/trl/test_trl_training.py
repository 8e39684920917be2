"""Trainers of TRL learn from rollouts of engines that serve exactly their weights."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from liveweight.integrations.trl import attach
from tests.trl.harness import ServedEngine, logged, logprobs, make_trainer

RATIO = "sampling/importance_sampling_ratio"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_importance_ratio_is_one_and_logprobs_are_the_trainers(
    model: Path, engine: ServedEngine, tmp_path: Path, temperature: float
) -> None:
    trainer = make_trainer(model, tmp_path, temperature=temperature, max_steps=3)
    with attach(trainer, engines=[engine.url]) as attached:
        trainer.train()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is True
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert min(logged(trainer, f"{RATIO}/min")) > 1 - 1e-3
    assert max(logged(trainer, f"{RATIO}/max")) < 1 + 1e-3


def test_answers_are_drawn_by_the_published_weights_in_the_order_of_the_prompts(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, temperature=0.7)
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1.5)  # other weights than those the engine was started with
    prompts = [[token, 7] for token in (5, 9, 30) for _ in range(4)]
    with attach(trainer, engines=[engine.url]):
        asked, answers, found, tokens = trainer.vllm_generation.generate(prompts, None, 4)
    assert asked == prompts
    for prompt, answer, given, ids in zip(prompts, answers, found, tokens, strict=True):
        expected = logprobs(trainer.model, prompt, answer, 0.7)
        assert torch.allclose(torch.tensor(given)[:, 0], expected, atol=1e-4)
        assert [one for [one] in ids] == answer
    assert len({tuple(answer) for answer in answers[:4]}) > 1  # each answer of a group is a draw of its own


def test_sampling_settings_reach_the_engine(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, top_k=1, generation_kwargs={"stop_token_ids": [3]})
    with attach(trainer, engines=[engine.url]):
        _, answers, found, _ = trainer.vllm_generation.generate([[5, 6]] * 4, None, 4)
    assert len({tuple(answer) for answer in answers}) == 1  # the likeliest token alone is left
    assert {value for answer in found for [value] in answer} == {0.0}


def test_rloo_learns_alike(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, kind="rloo", temperature=0.7)
    before = engine.rounds()
    with attach(trainer, engines=[engine.url]) as attached:
        trainer.train()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is True
    assert engine.labels_since(before) == ["step_0", "step_1"]
    assert len(logged(trainer, "reward")) == 2
    assert len(logged(trainer, "weight_sync/total_s")) == 2


def test_weights_are_published_once_per_step_that_is_followed_by_rollouts(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    """Steps of two micro-batches. Rollouts for four micro-batches are used twice: for eight micro-batches, which are four steps."""
    trainer = make_trainer(
        model,
        tmp_path,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
    )
    before = engine.rounds()
    with attach(trainer, engines=[engine.url]):
        trainer.train()
    assert engine.labels_since(before) == ["step_0", "step_4"]


def test_evaluation_and_a_second_run_publish_what_changed_under_labels_of_their_own(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=1, evaluate=True)
    before = engine.rounds()
    with attach(trainer, engines=[engine.url]) as attached:
        trainer.train()
        trainer.evaluate()  # after the step
        trainer.evaluate()  # nothing changed
        trainer.train()  # steps begin anew
        trainer.evaluate()
        assert attached.publisher is not None
        assert attached.publisher.verify().match is True
    labels = engine.labels_since(before)
    assert labels == ["step_0", "step_1", "step_0_2", "step_1_2"]
    assert len(logged(trainer, "eval_reward")) >= 1
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < 1e-4


def test_weights_changed_by_hand_are_published_when_that_is_said(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, evaluate=True)
    before = engine.rounds()
    with attach(trainer, engines=[engine.url]) as attached:
        trainer.evaluate()
        with torch.no_grad():
            trainer.model.model.norm.weight.mul_(1.5)
        attached.weights_changed()
        trainer.evaluate()
    assert engine.labels_since(before) == ["step_0", "step_0_2"]
    assert max(logged(trainer, "eval_sampling/sampling_logp_difference/max")) < 1e-4


def test_adapters_are_merged_on_the_way_and_the_base_is_not_touched(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    from peft import LoraConfig

    trainer = make_trainer(model, tmp_path, peft=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    base = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items() if "lora" not in name}
    with attach(trainer, engines=[engine.url]):
        trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    after = trainer.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
    assert any(bool(tensor.abs().max() > 0) for name, tensor in after.items() if "lora_B" in name)


def test_a_fleet_shares_the_prompts(
    model: Path, engine: ServedEngine, other_engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=3)  # two prompts each: one for each engine
    before = [one.prompt_tokens() for one in (engine, other_engine)]
    with attach(trainer, engines=[engine.url, other_engine.url]):
        trainer.train()
    grown = [one.prompt_tokens() - past for one, past in zip((engine, other_engine), before, strict=True)]
    assert min(grown) > 0
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "rollouts/refused") == [0, 0, 0]


def test_single_prompts_of_unequal_length_are_asked_one_by_one(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    """As TRL's tool loop asks, within one step: each prompt has a history of its own."""
    trainer = make_trainer(model, tmp_path)
    prompts = [[5, 6], [5, 6, 7], [9]]
    with attach(trainer, engines=[engine.url]):
        _, answers, found, _ = trainer.vllm_generation.generate(prompts, None, 1)
    assert [len(one) for one in found] == [len(one) for one in answers]
    assert trainer.vllm_mode == "server"  # colocate has TRL's loop look into an engine of its own process


def test_the_publisher_is_closed_with_the_trainer(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=1)
    publisher: Any = attach(trainer, engines=[engine.url]).publisher
    trainer.train()
    del trainer
    gc.collect()
    with pytest.raises(Exception, match="closed"):
        publisher.publish("later")


def test_a_closed_attachment_generates_nothing(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, max_steps=1)
    attached = attach(trainer, engines=[engine.url])
    attached.close()
    attached.close()
    with pytest.raises(Exception, match="closed"):
        trainer.train()
