"""An actor of Ray that takes an update from a trainer that has its handle: an `LLM`, or an `AsyncLLM` while it generates."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import ray
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

import liveweight as lw

PROMPT: Any = {"prompt_token_ids": [5, 6, 7, 8]}


def greedy(count: int) -> SamplingParams:
    """So many tokens."""
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)


def settings(model: str) -> dict[str, Any]:
    """Of either kind."""
    transfer = WeightTransferConfig(backend="liveweight")
    return {
        "model": model,
        "enforce_eager": True,
        "max_model_len": 256,
        "weight_transfer_config": transfer,
    }


class Plain(LLM):  # type: ignore[misc] # vLLM has no types here
    """An `LLM` as an actor."""

    def __init__(self, model: str) -> None:
        super().__init__(**settings(model))

    def tokens(self, count: int) -> list[int]:
        """What it generates."""
        return list(self.generate([PROMPT], greedy(count), use_tqdm=False)[0].outputs[0].token_ids)


class Concurrent(AsyncLLM):  # type: ignore[misc]
    """An `AsyncLLM` as an actor, whose methods are its loop's."""

    def __init__(self, model: str) -> None:
        config = AsyncEngineArgs(**settings(model)).create_engine_config()
        super().__init__(config, Executor.get_class(config), log_stats=False)

    async def tokens(self, count: int) -> list[int]:
        """What it generates."""
        last = None
        async for output in self.generate(PROMPT, greedy(count), f"of-{count}"):
            last = output
            await asyncio.sleep(0)
        return list(last.outputs[0].token_ids) if last is not None else []


def main(kind: str, model: str, new: str) -> None:
    """Prints what it generates before, after, and when it went back, and how the request ended that ran across."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    engine = ray.remote({"LLM": Plain, "AsyncLLM": Concurrent}[kind]).remote(model)
    said = [f"before {ray.get(engine.tokens.remote(12))}"]
    across = engine.tokens.remote(200)
    with lw.Publisher(Path(new), engines=[lw.vllm(engine)], timeout_s=240) as publisher:
        publisher.publish("step_1")
        matches = publisher.verify().match
        version = ray.get(engine.get_weight_version.remote())
        said.append(f"after {ray.get(engine.tokens.remote(12))}")
        publisher.undo()
    said.append(f"back {ray.get(engine.tokens.remote(12))}")
    said.append(f"across {len(ray.get(across))} {matches} {version}")
    ray.shutdown()
    sys.stdout.write("\n".join(said) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
