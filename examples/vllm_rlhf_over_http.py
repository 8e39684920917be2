"""vLLM's own flow of RLHF over HTTP, with only the backend changed: its client, its source, its trainer-side engine, its pause and resume.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --served-model-name policy --weight-transfer-config '{"backend": "liveweight"}'
    python examples/vllm_rlhf_over_http.py NEW

NEW is the trained model, of MODEL's architecture. Beside a program for another backend, one import and one line differ (marked below).
What is gained: a `send_weights` that fails raises, and leaves vLLM on the weights that it had; nothing waits for ever; and a program that
leaves the pause to liveweight (`lw.vllm`) has vLLM stand still for the install alone.
"""

from __future__ import annotations

import argparse

import requests
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from liveweight.integrations.vllm.trainer import TrainerInit  # the backend

PROMPTS = ("Hello, my name is", "The capital of France is")


def completions(url: str, model: str) -> list[str]:
    """What the server generates now."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    return [
        client.completions.create(model=model, prompt=prompt, max_tokens=16, temperature=0).choices[0].text
        for prompt in PROMPTS
    ]


def post(url: str, **query: str) -> None:
    """One of the server's routes for RL."""
    requests.post(url, params=query, timeout=300).raise_for_status()


def main() -> None:
    """Generate, send the trained weights, generate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("new", help="the trained model's directory")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--name", default="policy", help="what the server calls its model")
    parser.add_argument("--secret-file", help="the one that vLLM's workers have; by default the user's own")
    arguments = parser.parse_args()
    url = arguments.url

    trained = AutoModelForCausalLM.from_pretrained(arguments.new, dtype=torch.bfloat16)
    print("before", completions(url, arguments.name))

    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=0, secret_file=arguments.secret_file),  # the backend
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(trained),
    )
    post(f"{url}/pause", mode="keep")
    engine.send_weights()
    post(f"{url}/resume")
    engine.shutdown()

    print("after", completions(url, arguments.name))
    print("version", requests.get(f"{url}/weight_info", timeout=300).json()["weight_version"])


if __name__ == "__main__":
    main()
