"""A trainer as vLLM shows them, with only the backend's name changed: a source, vLLM's own client, `trainer_init`, `send_weights`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from liveweight.integrations.vllm.trainer import TrainerInit


class Files(WeightSource):  # type: ignore[misc] # vLLM has no types here
    """The tensors of a checkpoint."""

    def __init__(self, directory: str) -> None:
        self._tensors: dict[str, Any] = load_file(f"{directory}/model.safetensors")

    def metadata(self) -> list[Any]:
        """What comes."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def main(url: str, secret: str, directory: str) -> None:
    """One update."""
    torch.set_num_threads(1)
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInit(rank=0, secret_file=secret), client=HTTPVLLMWeightSyncClient(url), source=Files(directory)
    )
    engine.send_weights()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
