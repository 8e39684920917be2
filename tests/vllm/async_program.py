"""An `AsyncLLM` that takes an update while it generates, from a trainer in another thread of the same process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import liveweight as lw


async def tokens(llm: Any, name: str, count: int = 12) -> list[int]:
    """What it generates: greedy."""
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    last = None
    async for output in llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, sampling, name):
        last = output
    return list(last.outputs[0].token_ids) if last is not None else []


def publish(llm: Any, loop: asyncio.AbstractEventLoop, new: str) -> bool:
    """Another thread than the loop's."""
    with lw.Publisher(Path(new), engines=[lw.vllm(llm, loop=loop)], timeout_s=240) as publisher:
        publisher.publish("step_1")
        return bool(publisher.verify().match)


async def main(model: str, new: str) -> None:
    """Prints what it generates before and after, and how the request ended that ran across."""
    arguments = AsyncEngineArgs(
        model=model,
        enforce_eager=True,
        max_model_len=256,
        weight_transfer_config=WeightTransferConfig(backend="liveweight"),
    )
    llm = AsyncLLM.from_engine_args(arguments)
    said = ["before " + str(await tokens(llm, "before"))]
    across = asyncio.create_task(tokens(llm, "across", 200))
    matches = await asyncio.to_thread(publish, llm, asyncio.get_running_loop(), new)
    said.append("after " + str(await tokens(llm, "after")))
    said.append(f"across {len(await across)} {matches} {await llm.get_weight_version()}")
    llm.shutdown()
    sys.stdout.write("\n".join(said) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
