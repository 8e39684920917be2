"""`attach`: lets a TRL trainer's rollouts come from engines that serve exactly its weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Self

from liveweight.api import Publisher
from liveweight.errors import TrainerRefused
from liveweight.integrations.connect import Engine
from liveweight.integrations.trl.checks import (
    check_contract,
    check_engine,
    check_trainer,
    is_sharded,
    longest_prompt,
    sampling_of,
)
from liveweight.integrations.trl.completions import CompletionEndpoint, EngineProblem, SamplingFields
from liveweight.integrations.trl.generation import EngineGeneration
from liveweight.integrations.trl.processes import TrainerProcesses
from liveweight.rounds.report import Report

RECOVER_S = 300.0
ANSWER_S = 600.0

_log = logging.getLogger("liveweight.trl")


class Attachment:
    """A trainer that is attached to engines. Use it as a context manager, or call `close` after the last `train()`; at the latest it is
    closed with the trainer."""

    def __init__(self, generation: EngineGeneration) -> None:
        self._generation = generation

    @property
    def publisher(self) -> Publisher | None:
        """The publisher; None at a process that publishes nothing, and under FSDP2 before the first rollouts."""
        return self._generation.publisher

    @property
    def report(self) -> Report | None:
        """The report of what was published last; None at a process that publishes nothing."""
        return self._generation.report

    def weights_changed(self) -> None:
        """Say that you changed the weights by hand between two evaluations: they are published before the next rollouts. Optimiser steps
        are noticed. Call it at every process."""
        self._generation.weights_changed()

    def close(self) -> None:
        """Close the publisher; the engines serve on. The trainer generates nothing any more."""
        self._generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    trainer: Any,
    engines: Sequence[Engine],
    *,
    api_key: str | None = None,
    recover_s: float = RECOVER_S,
    answer_s: float = ANSWER_S,
    **publisher_options: Any,
) -> Attachment:
    """Let rollouts of a GRPOTrainer or an RLOOTrainer come from these engines, which serve exactly the trainer's weights.

        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=False, ...))
        attach(trainer, engines=["http://127.0.0.1:8000"])
        trainer.train()

    `engines` are URLs of liveweight engines, or `lw.vllm(URL)`. Every process of the trainer calls it. What the trainer asks for that
    engines do not do is refused here (TrainerRefused), and names, dtypes and shapes are compared here; under FSDP2 with the first rollouts.

    `api_key` is the key of the engines' OpenAI routes, and of their control routes unless `control_key` is given. A lost engine is waited
    for up to `recover_s`; one request may take `answer_s`. `publisher_options` are those of `lw.Publisher`: with `quorum=`, training goes
    on without engines that stay away.
    """
    check_contract(trainer)
    endpoints = [CompletionEndpoint.of(engine, api_key) for engine in engines]
    if not endpoints:
        raise TrainerRefused("without engines there is nobody to generate")
    taken = sorted({"group", "address", "dtype"} & publisher_options.keys())
    if taken:
        raise TrainerRefused(f"{', '.join(taken)}: attach decides that by itself, or has no use for it")
    check_trainer(trainer, vllm_only=all(one.dialect == "vllm" for one in endpoints))
    if api_key is not None:
        publisher_options.setdefault("control_key", api_key)
    sampling, sharded = sampling_of(trainer), is_sharded(trainer.accelerator)
    processes = TrainerProcesses(trainer.accelerator)
    error: Exception | None = None
    if processes.is_main:
        try:
            _try_out(trainer, endpoints, sampling)
        except Exception as failed:  # of any kind: every process must hear of it
            error = failed
    processes.agree(error)

    def make_publisher() -> Publisher | None:
        if sharded:
            import torch.distributed as dist

            publisher_options["group"] = dist.group.WORLD
        elif not processes.is_main:
            return None
        return Publisher(trainer.model, engines=engines, **publisher_options)

    generation = EngineGeneration(
        trainer,
        endpoints=endpoints,
        sampling=sampling,
        make_publisher=make_publisher,
        merge_adapters=sharded and hasattr(trainer.model, "merge_adapter"),
        recover_s=recover_s,
        answer_s=answer_s,
    )
    if not sharded:
        generation.connect()
    _install(trainer, generation)
    return Attachment(generation)


def _try_out(trainer: Any, endpoints: Sequence[CompletionEndpoint], sampling: SamplingFields) -> None:
    """Let every engine answer a request as the trainer's will be. One that takes none at present is tried by the first rollouts."""
    longest = longest_prompt(trainer)
    count = max(trainer.num_generations, trainer.num_generations_eval)
    token = int(trainer.eos_token_ids[0])
    for endpoint in endpoints:
        model = endpoint.describe()
        if isinstance(model, EngineProblem):
            _log.warning("%s; it is tried with the first rollouts", model.reason)
            continue
        check_engine(endpoint, model, sampling, longest=longest)
        problem = endpoint.try_out(sampling, count, token)
        if problem is not None:
            _log.warning("%s; it is tried with the first rollouts", problem.reason)


def _install(trainer: Any, generation: EngineGeneration) -> None:
    """Put ours where TRL's own VLLMGeneration would be."""
    from liveweight.integrations.trl.step_callback import WeightsChangedCallback

    trainer.add_callback(WeightsChangedCallback(generation))
    trainer.vllm_mode = "server"  # `colocate` has the tool loop look into an engine of this process
    trainer.vllm_generation = generation
    trainer._last_loaded_step = -1
    trainer.use_vllm = True
    weakref.finalize(trainer, generation.resources.close)
