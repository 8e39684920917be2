"""What engines cannot do for a trainer is refused when it is attached, in one line that names it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import liveweight as lw
from liveweight.errors import LiveWeightError, ManifestMismatch, RequestInvalid, TrainerRefused
from liveweight.integrations.trl import attach, checks
from tests.trl.harness import ServedEngine, make_trainer

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs has num_beams"),
    "a temperature that TRL would not know": ({"generation_kwargs": {"temperature": 2.0}}, "has temperature"),
    "what only vLLM knows": ({"generation_kwargs": {"min_tokens": 2}}, "has min_tokens"),
    "a pattern": ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex: .*pattern"),
    "colocated engines": ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode: colocated"),
    "transformers' batching": ({"use_transformers_continuous_batching": True}, "continuous_batching"),
    "long completions": ({"max_completion_length": 4096}, "a context of 2048 tokens: too short"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_engines_do_not_know_are_refused(
    model: Path, engine: ServedEngine, tmp_path: Path, case: str
) -> None:
    config, message = CONFIGS[case]
    trainer = make_trainer(model, tmp_path, **config)
    with pytest.raises(TrainerRefused, match=message) as refused:
        attach(trainer, engines=[engine.url])
    assert "\n" not in str(refused.value)
    assert refused.value.code == "LW-115"
    assert trainer.use_vllm is False  # it is as it was


def test_a_prompt_beyond_the_context_is_refused(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, prompts=["short", "long " * 3000])
    with pytest.raises(TrainerRefused, match="too short for a prompt of"):
        attach(trainer, engines=[engine.url])


def test_more_answers_than_an_engine_takes_are_refused(
    model: Path, engine: ServedEngine, tmp_path: Path
) -> None:
    trainer = make_trainer(model, tmp_path, num_generations=2000, per_device_train_batch_size=2000)
    with pytest.raises(RequestInvalid, match=r"n: .*1024"):
        attach(trainer, engines=[engine.url])


def test_rollout_functions_are_refused(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, more={"rollout_func": lambda prompts, _: prompts})
    with pytest.raises(TrainerRefused, match="rollout_func generates by itself"):
        attach(trainer, engines=[engine.url])


def test_a_trainer_is_attached_once(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path)
    with attach(trainer, engines=[engine.url]), pytest.raises(TrainerRefused, match="attached already"):
        attach(trainer, engines=[engine.url])


ENGINES: dict[str, tuple[Any, str]] = {
    "none": ([], "without engines"),
    "a leader's address": (["ipc:///tmp/engine.sock"], "is no URL"),
    "a vLLM in this process": ([lw.vllm(object())], "a VllmEngine is no URL"),
}


@pytest.mark.parametrize("case", ENGINES)
def test_engines_that_cannot_be_asked_over_http_are_refused(model: Path, tmp_path: Path, case: str) -> None:
    engines, message = ENGINES[case]
    with pytest.raises(TrainerRefused, match=message):
        attach(make_trainer(model, tmp_path), engines=engines)


def test_options_that_attach_decides_are_refused(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    with pytest.raises(TrainerRefused, match="group: attach decides"):
        attach(make_trainer(model, tmp_path), engines=[engine.url], group=object())


def test_another_model_than_the_engines_is_refused(model: Path, engine: ServedEngine, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path)
    trainer.model.model.layers = trainer.model.model.layers[:2]
    with pytest.raises(ManifestMismatch, match="missing"):
        attach(trainer, engines=[engine.url])
    assert trainer.use_vllm is False


@pytest.mark.usefixtures("place")
def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(TrainerRefused, match="takes a GRPOTrainer or an RLOOTrainer, not str"):
        attach("trainer", engines=["http://127.0.0.1:1"])


def test_a_release_of_trl_that_is_built_otherwise_is_refused_with_its_version(
    model: Path, tmp_path: Path
) -> None:
    from trl import GRPOTrainer

    class Renamed(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *_: object) -> Any:
            return self.engine.generate()

    trainer = make_trainer(model, tmp_path)
    trainer.__class__ = Renamed
    with pytest.raises(
        TrainerRefused, match=r"Renamed of TRL 1\.\d+\.\d+ has no .*sync_weights.*tested with"
    ):
        attach(trainer, engines=["http://127.0.0.1:1"])
    trainer.__class__ = GRPOTrainer
    del trainer._metrics
    with pytest.raises(TrainerRefused, match=r"GRPOTrainer of TRL 1\.\d+\.\d+ has no _metrics"):
        attach(trainer, engines=["http://127.0.0.1:1"])


BACKENDS: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO-3": (
        {"distributed_type": "DEEPSPEED", "state": {"deepspeed_plugin": {"zero_stage": 3}}},
        "ZeRO-3",
    ),
    "FSDP1": ({"distributed_type": "FSDP", "state": {"fsdp_plugin": {"fsdp_version": 1}}}, "FSDP1"),
    "Megatron": ({"distributed_type": "MEGATRON_LM", "state": {}}, "MEGATRON_LM"),
}


@pytest.mark.parametrize("case", BACKENDS)
def test_other_ways_of_sharding_are_refused(model: Path, tmp_path: Path, case: str) -> None:
    fields, message = BACKENDS[case]
    trainer = make_trainer(model, tmp_path)
    trainer.accelerator = namespace({"num_processes": 1, "process_index": 0, "device": "cpu", **fields})
    with pytest.raises(TrainerRefused, match=message):
        attach(trainer, engines=["http://127.0.0.1:1"])


def namespace(fields: Any) -> Any:
    """Nested dicts as attributes."""
    if not isinstance(fields, dict):
        return fields
    return SimpleNamespace(**{name: namespace(value) for name, value in fields.items()})


def test_an_engine_that_is_not_there_fails_the_attachment(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path)
    with pytest.raises(LiveWeightError, match=r"http://127\.0\.0\.1:1 "):
        attach(trainer, engines=["http://127.0.0.1:1"], timeout_s=2.0)


@pytest.mark.usefixtures("place")
def test_the_tested_release_is_the_one_that_is_installed() -> None:
    assert checks.trl_version().startswith(checks.TESTED)
