"""Random weights as files: one tensor at a time, a shard at a time, the same bytes for the same seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from liveweight.checkpoint import INDEX, SINGLE
from liveweight.spec.manifest import TensorSpec
from liveweight.trainer.sources.tensors import torch_dtypes

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1_500_000_000
METADATA = {"format": "pt"}


def write_weights(
    directory: Path, tensors: Sequence[TensorSpec], *, seed: int, std: float, shard_bytes: int = SHARD_BYTES
) -> None:
    """One file, or shards and their index; no more than a shard is held in memory."""
    from safetensors.torch import save_file

    shards = list(_shards(tensors, shard_bytes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        drawn = {spec.name: draw(spec, seed=seed, std=std) for spec in shard}
        save_file(drawn, directory / file, metadata=METADATA)
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # it was made for its owner alone
        where |= {spec.name: file for spec in shard}
    if len(shards) > 1:
        total = sum(spec.size_bytes for spec in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def draw(spec: TensorSpec, *, seed: int, std: float) -> torch.Tensor:
    """The tensor of that name: ones for a norm, else normal. It depends on name, shape, seed and std alone."""
    import torch

    dtype = torch_dtypes()[spec.dtype]
    if len(spec.shape) == 1:
        return torch.ones(spec.shape, dtype=dtype)
    generator = np.random.Generator(np.random.SFC64([seed, xxhash.xxh3_64_intdigest(spec.name.encode())]))
    values = generator.standard_normal(math.prod(spec.shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(std).to(dtype).view(spec.shape)


def _shards(tensors: Sequence[TensorSpec], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    size = 0
    for spec in tensors:
        if shard and size + spec.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.size_bytes
    yield shard
