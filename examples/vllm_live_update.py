"""vLLM generates, takes new weights while it runs, and generates with them; what it then holds is compared with what was published.

    python examples/vllm_live_update.py MODEL NEW

MODEL and NEW are two checkpoints of one architecture. Trainer and engine are one program here: `lw.vllm` takes the URL of a server
(`VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "liveweight"}'`) as well as an `LLM`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

import liveweight as lw

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)


def tokens(llm: LLM) -> list[int]:
    """What it generates now."""
    return list(
        llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    )


def main(model: str, new: str) -> None:
    """Start, generate, publish, verify, go back."""
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        weight_transfer_config=WeightTransferConfig(backend="liveweight"),
    )
    before = tokens(llm)
    print("started on", Path(model).name, before)
    with lw.Publisher(Path(new), engines=[lw.vllm(llm)]) as publisher:
        report = publisher.publish("step_1")
        after = tokens(llm)
        print(
            f"published {report.version} in {report.total_s:.2f} s, vLLM says {llm.get_weight_version()}",
            after,
        )
        print("verified" if publisher.verify().match else "differs")
        publisher.undo()
        print("went back" if tokens(llm) == before else "is neither", llm.get_weight_version())


if __name__ == "__main__":
    main(*sys.argv[1:])
