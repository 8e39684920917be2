"""A checkpoint directory with random weights: configuration, weights and tokenizer, all or nothing.

The tensors are those that the engine's own model declares.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path

from liveweight.engine.init_model.sizes import Dtype, Size, config
from liveweight.engine.init_model.tokenizer import special_ids, write_tokenizer
from liveweight.engine.init_model.weights import SHARD_BYTES, write_weights
from liveweight.engine.models.forward import Solo
from liveweight.engine.models.model_spec import CONFIG, GENERATION, ModelSpec
from liveweight.errors import EngineConfigInvalid
from liveweight.spec.manifest import TensorSpec

SEEDS = 1 << 63


def init_model(
    directory: Path,
    size: Size,
    *,
    mtp: bool = False,
    tied: bool = True,
    dtype: Dtype = "float32",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the directory, which must be new or empty; the same arguments give the same bytes. Returns the number of parameters."""
    if not 0 <= seed < SEEDS:
        raise EngineConfigInvalid(f"seed {seed} is not between 0 and {SEEDS - 1}")
    ids = special_ids(size.vocab)
    fields = config(size, tied=tied, mtp=mtp, dtype=dtype, ids=ids)
    try:
        if directory.exists() and not _is_empty(directory):
            raise EngineConfigInvalid(f"{directory} exists and is not an empty directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        building = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
        building.mkdir()
        try:
            _write(building / CONFIG, fields)
            _write(
                building / GENERATION, {"eos_token_id": [ids["eos"], ids["end"]], "pad_token_id": ids["pad"]}
            )
            tensors = _tensors(building, mtp=mtp)
            write_weights(building, tensors, seed=seed, std=size.std, shard_bytes=shard_bytes)
            write_tokenizer(building, size.vocab)
            building.replace(directory)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    except OSError as error:
        raise EngineConfigInvalid(f"{directory} cannot be written: {error}") from error
    return sum(spec.elements for spec in tensors)


def _is_empty(directory: Path) -> bool:
    return directory.is_dir() and next(directory.iterdir(), None) is None


def _tensors(directory: Path, *, mtp: bool) -> list[TensorSpec]:
    """What a model of that configuration declares, in order."""
    import msgspec
    import torch

    from liveweight.engine.models.model import build

    spec = ModelSpec.read(directory, weights=False)
    model = build(
        msgspec.structs.replace(spec, draft_layers=int(mtp)),
        Solo(),
        dtype=getattr(torch, spec.dtype),
        device="meta",
        draft=mtp,
    )
    return [tensor for one in model.declarations().values() for tensor in one.tensors]


def _write(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
