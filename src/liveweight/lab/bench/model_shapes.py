"""The weights that benchmarks move: shapes of a dense decoder, and what each rank of a tensor-parallel engine holds of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import box, whole

if TYPE_CHECKING:
    import torch

HIDDEN, KEYS, INNER, VOCABULARY = 2048, 1024, 6144, 32768
SMALL = (128, 128)


def decoder(size_bytes: int) -> list[TensorSpec]:
    """Embedding, then as many layers as fit: q, k, v, o, gate, up, down and two norms each."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, HIDDEN)}
    layer = {
        "q.weight": (HIDDEN, HIDDEN),
        "k.weight": (KEYS, HIDDEN),
        "v.weight": (KEYS, HIDDEN),
        "o.weight": (HIDDEN, HIDDEN),
        "gate.weight": (INNER, HIDDEN),
        "up.weight": (INNER, HIDDEN),
        "down.weight": (HIDDEN, INNER),
        "norm1.weight": (HIDDEN,),
        "norm2.weight": (HIDDEN,),
    }
    one = 2 * sum(map(math.prod, layer.values()))
    for number in range(max(1, round((size_bytes - 2 * VOCABULARY * HIDDEN) / one))):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return [TensorSpec(name=name, dtype=DType.BFLOAT16, shape=shape) for name, shape in shapes.items()]


def small_tensors(size_bytes: int, tensors: int) -> list[TensorSpec]:
    """That many equal tensors with those bytes in all."""
    rows = max(1, size_bytes // tensors // (2 * SMALL[1]))
    return [
        TensorSpec(name=f"layers.{number}.weight", dtype=DType.BFLOAT16, shape=(rows, SMALL[1]))
        for number in range(tensors)
    ]


def parameters(specs: list[TensorSpec], rank: int, world: int) -> dict[str, tuple[torch.Tensor, list[Piece]]]:
    """A rank's parameters, touched: q, k, v and gate, up fused and split by rows, o and down by columns, norms whole."""
    by_name = {spec.name: spec for spec in specs}
    fused = {"k": "", "v": "", "up": "", "q": "k v", "gate": "up"}
    held: dict[str, tuple[torch.Tensor, list[Piece]]] = {}
    for spec in specs:
        prefix, part = (
            spec.name.removesuffix(".weight").rsplit(".", 1) if "." in spec.name[:-7] else ("", spec.name)
        )
        if fused.get(part) == "":
            continue
        parts = [spec, *(by_name[f"{prefix}.{other}.weight"] for other in fused.get(part, "").split())]
        held[spec.name] = _parameter(parts, rank, world, by_columns=part in ("o", "down"))
    return held


def _parameter(
    specs: list[TensorSpec], rank: int, world: int, *, by_columns: bool
) -> tuple[torch.Tensor, list[Piece]]:
    """One parameter that holds a rank's share of these tensors, one below the other."""
    import torch

    pieces, at = [], 0
    for spec in specs:
        if len(spec.shape) == 1:
            pieces.append(Piece(tensor=spec, region=whole(spec.shape)))
            return torch.ones(spec.shape, dtype=torch.bfloat16), pieces
        rows, columns = spec.shape
        region = (
            box((0, rows), _share(columns, rank, world))
            if by_columns
            else box(_share(rows, rank, world), (0, columns))
        )
        pieces.append(Piece(tensor=spec, region=region, at=(at, 0)))
        at += region[0].count
    return torch.ones((at, pieces[0].region[1].count), dtype=torch.bfloat16), pieces


def _share(size: int, rank: int, world: int) -> tuple[int, int]:
    return size * rank // world, size * (rank + 1) // world


def module_of(specs: list[TensorSpec]) -> torch.nn.Module:
    """The trainer's weights, as a module tree with random values."""
    import torch

    root = torch.nn.Module()
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 14, 1 << 22, dtype=np.int16))
    for spec in specs:
        *path, last = spec.name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = parent.get_submodule(part)
        repeats = -(-spec.elements // noise.numel())
        longer = noise if repeats == 1 else noise.repeat(repeats)
        values = longer[: spec.elements].view(torch.bfloat16).view(spec.shape)
        parent.register_parameter(last, torch.nn.Parameter(values.clone(), requires_grad=False))
    return root
