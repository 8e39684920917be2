"""A small decoder's weights: full tensors by version, and what each rank of a replica holds of them.

Everything follows from a label and a rank, so that any process can say which bits another one must hold.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from liveweight.spec.dtype import DType
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import box, whole

HIDDEN, HEADS_OUT, INNER, LAYERS = 16, 16, 32, 2

Parameters = dict[str, tuple[torch.Tensor, list[Piece]]]


def specs(dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorSpec]:
    """The full tensors of the engine."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (24, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (HEADS_OUT, HIDDEN) for name in ("q", "k", "v")}
        shapes |= {
            f"{prefix}o.weight": (HIDDEN, HEADS_OUT),
            f"{prefix}up.weight": (INNER, HIDDEN),
            f"{prefix}down.weight": (HIDDEN, INNER),
            f"{prefix}norm.weight": (HIDDEN,),
        }
    named = DType(str(dtype).removeprefix("torch."))
    tensors = {name: TensorSpec(name=name, dtype=named, shape=shape) for name, shape in shapes.items()}
    for kind in DType:
        name = f"extra.as_{kind.value}"
        tensors[name] = TensorSpec(name=name, dtype=kind, shape=(3, 5))
    tensors["extra.empty"] = TensorSpec(name="extra.empty", dtype=named, shape=(0, 4))
    tensors["extra.scalar"] = TensorSpec(name="extra.scalar", dtype=DType.FLOAT32, shape=())
    return tensors


def full(label: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The weights of that version."""
    generator = torch.Generator().manual_seed(label)
    return {name: _values(spec, generator) for name, spec in specs(dtype).items()}


def _values(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Numbers where the model computes with them, any bits elsewhere."""
    if not spec.name.startswith("extra."):
        return torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype.value))
    raw = torch.randint(0, 2 if spec.dtype is DType.BOOL else 256, (spec.size_bytes,), generator=generator)
    return raw.to(torch.uint8).view(getattr(torch, spec.dtype.value)).reshape(spec.shape)


def parameters(rank: int, world: int, label: int = 0, dtype: torch.dtype = torch.bfloat16) -> Parameters:
    """What a rank holds: q, k, v fused and split by rows, o and down by columns, up transposed, norms whole; at that version."""
    tensors, values, held = specs(dtype), full(label, dtype), {}
    rows, wide = HEADS_OUT // world, INNER // world
    mine = (rank * rows, (rank + 1) * rows)
    inner = (rank * wide, (rank + 1) * wide)
    for layer in range(LAYERS):
        prefix = f"layers.{layer}."
        fused = [tensors[f"{prefix}{name}.weight"] for name in ("q", "k", "v")]
        held[f"{prefix}qkv"] = (
            torch.cat([values[spec.name][slice(*mine)] for spec in fused]),
            [
                Piece(tensor=spec, region=box(mine, (0, HIDDEN)), at=(i * rows, 0))
                for i, spec in enumerate(fused)
            ],
        )
        o, up, down, norm = (tensors[f"{prefix}{n}.weight"] for n in ("o", "up", "down", "norm"))
        held[f"{prefix}o"] = (
            values[o.name][:, slice(*mine)].contiguous(),
            [Piece(tensor=o, region=box((0, HIDDEN), mine))],
        )
        held[f"{prefix}up"] = (
            values[up.name][slice(*inner)].T.contiguous(),
            [Piece(tensor=up, region=box(inner, (0, HIDDEN)), axes=(1, 0))],
        )
        held[f"{prefix}down"] = (
            values[down.name][:, slice(*inner)].contiguous(),
            [Piece(tensor=down, region=box((0, HIDDEN), inner))],
        )
        held[f"{prefix}norm"] = (values[norm.name].clone(), [Piece(tensor=norm, region=whole(norm.shape))])
    embed = tensors["embed.weight"]
    for name in (name for name in tensors if name.startswith("extra.")):
        held[name] = (values[name].clone(), [Piece(tensor=tensors[name], region=whole(tensors[name].shape))])
    padded = torch.zeros((32, HIDDEN), dtype=dtype)
    padded[:24] = values[embed.name]
    held["embed"] = (padded, [Piece(tensor=embed, region=whole(embed.shape))])
    return held


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of all bits, by name."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def expected(label: int, rank: int, world: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """The fingerprint that a rank must have at that version."""
    return fingerprint({name: tensor for name, (tensor, _) in parameters(rank, world, label, dtype).items()})


def module(label: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The full weights as a module tree, as a trainer has them."""
    values = full(label, dtype)
    kept = values["layers.0.down.weight"]
    values["layers.0.down.weight"] = kept.T.contiguous().T  # a trainer may keep it transposed
    return tree(values)


def tree(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Modules whose parameters have these names and values."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            child = parent._modules[part]
            if child is None:
                raise ValueError(name)
            parent = child
        parent.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def load(weights: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module these values, in place, as an optimiser would."""
    parameters = dict(weights.named_parameters())
    with torch.no_grad():
        for name, tensor in values.items():
            parameters[name].copy_(tensor)
