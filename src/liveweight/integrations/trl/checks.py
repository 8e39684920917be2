"""What a trainer must be for its rollouts to come from engines. Checked when it is attached, so that nothing of it fails at step 40.

Two kinds of reasons: TRL is not the one that this was written for (`check_contract`), or the trainer asks for what engines do not do
(`check_trainer`, `check_engine`). All of them raise TrainerRefused, in one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from liveweight.errors import MissingExtra, TrainerRefused
from liveweight.integrations.trl.completions import PROCESSED, CompletionEndpoint, SamplingFields, ServedModel

TESTED = "1.16"
"""The releases of TRL that the tests run with."""

ATTRIBUTES = (
    *(
        "accelerator",
        "args",
        "model",
        "state",
        "add_callback",
        "_metrics",
        "_is_vlm",
        "_tokenizer",
        "eos_token_ids",
    ),
    *("use_vllm", "vllm_mode", "num_generations", "num_generations_eval", "max_completion_length"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
)
"""What is read of a trainer."""
CALLED = ("use_vllm", "vllm_generation", "sync_weights", "generate", "_last_loaded_step", "global_step")
"""What a trainer's `_generate_single_turn` must use for ours to be called."""

GENERATION_KWARGS = frozenset({"seed", "stop", "stop_token_ids", "ignore_eos"})
VLLM_GENERATION_KWARGS = GENERATION_KWARGS | {
    *("frequency_penalty", "presence_penalty", "min_tokens", "logit_bias", "include_stop_str_in_output"),
}
"""What TRL's `generation_kwargs` may have: fields of a completion request that TRL has no setting for."""

LONGEST = 64
"""How many of a dataset's longest prompts, by characters, are counted in tokens."""


def trl_version() -> str:
    """The release of TRL that is installed. MissingExtra without one."""
    try:
        return version("trl")
    except PackageNotFoundError:
        raise MissingExtra("attach", "trl") from None


def check_contract(trainer: object) -> None:
    """Refuse what is no trainer of ours, and a TRL whose trainers are built otherwise than those of the tested releases."""
    installed = trl_version()
    from trl import GRPOTrainer, RLOOTrainer

    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise TrainerRefused(f"attach takes a GRPOTrainer or an RLOOTrainer, not {type(trainer).__name__}")
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]
    turn = getattr(type(trainer), "_generate_single_turn", None)
    used = () if turn is None else _names(inspect.unwrap(turn))
    missing += [f"_generate_single_turn using {name}" for name in CALLED if name not in used]
    if missing:
        raise TrainerRefused(
            f"{type(trainer).__name__} of TRL {installed} has no {', '.join(missing)}: "
            f"attach was tested with TRL {TESTED}"
        )


def check_trainer(trainer: Any, *, vllm_only: bool) -> None:
    """Refuse a trainer that asks for what engines do not do. `vllm_only`: all engines are vLLM's."""
    args = trainer.args
    if getattr(trainer, "vllm_generation", None) is not None:
        raise TrainerRefused(
            "it generates with vLLM or is attached already: make the trainer with use_vllm=False, and attach it once"
        )
    if trainer.use_vllm:
        raise TrainerRefused("it was made with use_vllm=True: make it with use_vllm=False")
    refused = {
        "use_transformers_continuous_batching": "transformers would generate: leave it out",
        "vllm_structured_outputs_regex": "answers are not constrained to a pattern: leave it out",
        "vllm_enable_sleep_mode": "colocated engines, which sleep while the trainer computes, are not driven: leave it out",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            raise TrainerRefused(f"{name}: {why}")
    if getattr(trainer, "rollout_func", None) is not None:
        raise TrainerRefused(
            "rollout_func generates by itself: leave it out, or publish in it with lw.Publisher"
        )
    if trainer._is_vlm:
        raise TrainerRefused("a model that takes images: engines take text only")
    if trainer.temperature <= 0:
        raise TrainerRefused(
            f"temperature={trainer.temperature}: rollouts are drawn, with a temperature above 0"
        )
    _check_generation_kwargs(args.generation_kwargs or {}, vllm_only=vllm_only)
    _check_loss(trainer)
    _check_backend(trainer.accelerator)


def is_sharded(accelerator: Any) -> bool:
    """Whether every process holds a part of the parameters only (FSDP2)."""
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)) == "FSDP"


def sampling_of(trainer: Any) -> SamplingFields:
    """How the trainer wants its completions drawn. Every end that TRL knows ends a completion, whatever the engine's own are."""
    more = dict(trainer.args.generation_kwargs or {})
    ends = [int(one) for one in (*trainer.eos_token_ids, *more.pop("stop_token_ids", ()))]
    if not more.get("ignore_eos"):
        more["stop_token_ids"] = sorted(set(ends))
    return SamplingFields(
        max_tokens=int(trainer.max_completion_length),
        temperature=float(trainer.temperature),
        top_p=float(trainer.top_p),
        top_k=int(trainer.top_k or 0),
        min_p=float(trainer.min_p or 0.0),
        repetition_penalty=float(trainer.repetition_penalty),
        more=more,
    )


def check_engine(
    endpoint: CompletionEndpoint, model: ServedModel, sampling: SamplingFields, *, longest: int
) -> None:
    """Refuse an engine whose context is too short for the trainer's prompts and completions, or whose logprobs are not those of the draw.
    `longest`: tokens of the longest prompt that is known."""
    if model.context is not None and longest + sampling.max_tokens > model.context:
        raise TrainerRefused(
            f"{endpoint.url} has a context of {model.context} tokens: too short for a prompt of {longest} and "
            f"max_completion_length={sampling.max_tokens}"
        )
    if endpoint.dialect != "vllm" or sampling.raw_is_processed or model.logprobs_mode == PROCESSED:
        return
    said = (
        "does not say its --logprobs-mode" if model.logprobs_mode is None else f"gives {model.logprobs_mode}"
    )
    raise TrainerRefused(
        f"{endpoint.url} {said}, which is not of the distribution that tokens are drawn from: "
        f"start vLLM with --logprobs-mode {PROCESSED}"
    )


def longest_prompt(trainer: Any) -> int:
    """Tokens of the longest prompt of the trainer's datasets, as far as that can be known beforehand: 1 for one that is streamed."""
    return max(
        1,
        *(
            _longest_of(trainer, dataset)
            for dataset in _datasets(trainer)
            if hasattr(dataset, "__len__") and "prompt" in (getattr(dataset, "column_names", None) or ())
        ),
    )


def _datasets(trainer: Any) -> list[Any]:
    found = [getattr(trainer, "train_dataset", None)]
    evaluation = getattr(trainer, "eval_dataset", None)
    found += list(evaluation.values()) if isinstance(evaluation, Mapping) else [evaluation]
    return [None, *(one for one in found if one is not None)]


def _longest_of(trainer: Any, dataset: Any) -> int:
    prompts = dataset["prompt"]
    if len(prompts) == 0 or getattr(trainer, "environment_factories", None) is not None:
        return 1  # an environment makes its prompts later
    by_length = sorted(prompts, key=_characters)[-LONGEST:]
    return max(len(_tokens(trainer, prompt)) for prompt in by_length)


def _characters(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    messages: Iterable[Any] = prompt if isinstance(prompt, Sequence) else ()
    return sum(len(str(message.get("content", ""))) for message in messages if isinstance(message, Mapping))


def _tokens(trainer: Any, prompt: object) -> Sequence[int]:
    tokenizer = trainer._tokenizer
    if isinstance(prompt, str):
        plain: Sequence[int] = tokenizer(text=prompt)["input_ids"]
        return plain
    found = tokenizer.apply_chat_template(
        prompt,
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]
    chat: Sequence[int] = found
    return chat


def _check_generation_kwargs(given: Mapping[str, Any], *, vllm_only: bool) -> None:
    known = VLLM_GENERATION_KWARGS if vllm_only else GENERATION_KWARGS
    unknown = sorted(set(given) - known)
    if unknown:
        raise TrainerRefused(
            f"generation_kwargs has {', '.join(unknown)}, which engines do not know or TRL has settings for; "
            f"it may have {', '.join(sorted(known))}"
        )


def _check_loss(trainer: Any) -> None:
    """What TRL itself checks only for a trainer that is made with use_vllm=True."""
    modes = ("token_truncate", "token_mask")
    mode = getattr(trainer, "vllm_importance_sampling_mode", None)
    corrected = getattr(trainer, "vllm_importance_sampling_correction", False)
    if getattr(trainer, "loss_type", None) == "vespo" and corrected and mode not in modes:
        raise TrainerRefused(
            f"loss_type vespo with vllm_importance_sampling_mode={mode}: TRL has it with {' or '.join(modes)}"
        )


def _check_backend(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "DEEPSPEED" and accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise TrainerRefused("DeepSpeed ZeRO-3 shards parameters in its own way: use FSDP2, or ZeRO 1 or 2")
    if kind == "FSDP":
        if getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
            raise TrainerRefused("FSDP1 flattens parameters: use FSDP2 (fsdp_version: 2)")
        return
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"):
        raise TrainerRefused(
            f"a trainer of distributed type {kind}: one process, DDP and FSDP2 are supported"
        )


def _names(function: Any) -> set[str]:
    """The names that a function uses, also in functions and comprehensions inside it."""
    found: set[str] = set()
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if code is not None:
            found |= {*code.co_names, *code.co_freevars}
            codes += [one for one in code.co_consts if inspect.iscode(one)]
    return found
