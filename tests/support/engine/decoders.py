"""What the models' tests share: small checkpoints, an attention without a cache, ranks as threads, and a target filled by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from liveweight.checkpoint import SINGLE
from liveweight.engine.init_model.sizes import Size
from liveweight.engine.models.forward import Batch, Group, Solo
from liveweight.engine.models.model import Model, build
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.rank.checkpoint_loading import load
from liveweight.spec.region import counts
from liveweight.worker.targets.torch_target import TensorTarget
from tests.support.layouts import Full, view

WAIT_S = 60.0
T = TypeVar("T")

DENSE = Size(
    hidden=48, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=515, max_positions=256
)
SPARSE = Size(
    hidden=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=515,
    max_positions=256,
    experts=6,
    experts_per_token=2,
    expert_intermediate=40,
)
"""Sizes that four ranks share unevenly: 515 tokens, 6 experts, 2 kv heads."""


def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend for one sequence that is all there."""
    del layer
    times = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(times, 1).transpose(0, 1) for part in (k, v))
    seen = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
    return seen.transpose(0, 1).flatten(1)


def batch_of(tokens: torch.Tensor, routing: list[torch.Tensor] | None = None) -> Batch:
    """One sequence from its beginning."""
    return Batch(tokens=tokens, positions=torch.arange(len(tokens)), attend=causal, routing=routing)


def tokens_of(count: int, vocab: int = 515, seed: int = 0) -> torch.Tensor:
    """Some tokens."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def loaded(
    directory: Path, group: Group | None = None, *, dtype: torch.dtype = torch.float32, draft: bool = False
) -> Model:
    """A rank's model, filled from the directory."""
    spec = ModelSpec.read(directory)
    model = build(spec, Solo() if group is None else group, dtype=dtype, device="cpu", draft=draft)
    load(model, directory)
    return model


def logits_of(model: Model, tokens: torch.Tensor, routing: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Of every position."""
    with torch.inference_mode():
        return model.logits(model.hidden(batch_of(tokens, routing)))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, beside the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@dataclass(slots=True)
class _Table:
    """Where the ranks lay their parts."""

    barrier: threading.Barrier
    parts: list[torch.Tensor | None]
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class ThreadGroup:
    """One rank of a group of threads."""

    rank: int
    size: int
    table: _Table

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum in rank order, in the part's memory."""
        return part.copy_(torch.stack(self._all(part)).sum(0))

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All parts side by side."""
        return torch.cat(self._all(part), dim=-1)

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self.table.parts[self.rank] = part.clone()
        self.table.barrier.wait(WAIT_S)
        parts = [one for one in self.table.parts if one is not None]
        self.table.barrier.wait(WAIT_S)
        return parts


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """Run the work on every rank of a group of threads; the first failure is raised."""
    table = _Table(threading.Barrier(size), [None] * size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory with a single file."""
    return load_file(directory / SINGLE)


def rewrite(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace them."""
    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept, directory / SINGLE, metadata={"format": "pt"})


def stage(target: TensorTarget, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write full tensors into the target's shadow, as its layout says, by plain slicing."""
    specs, memories = target.layout.specs(), [memory.bytes() for memory in target.shadow()]
    for placement in target.layout.placements:
        spec = specs[placement.name]
        tensor = next(tensors[name] for name in spec.names if name in tensors)
        raw = tensor.contiguous().unsqueeze(-1).view(torch.uint8).numpy()
        part = Full(spec=spec, raw=np.ascontiguousarray(raw)).part(placement.region)
        if 0 not in counts(placement.region):
            view(memories[placement.memory], placement, spec.dtype.size_bytes)[...] = part
