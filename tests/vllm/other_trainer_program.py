"""A trainer in an environment of its own, with another version of torch than vLLM's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import liveweight as lw


def main(url: str, secret: str, directory: str) -> None:
    """One update, from tensors of this torch; prints whose it is, and whether vLLM holds it."""
    torch.set_num_threads(1)
    tensors = load_file(f"{directory}/model.safetensors")
    with lw.Publisher(tensors, engines=[lw.vllm(url)], secret=Path(secret), timeout_s=240) as publisher:
        publisher.publish("other")
        sys.stdout.write(f"{torch.__version__} {publisher.verify().match}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
