"""Files between Paddle and liveweight, both ways, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from liveweight.devices.memory import Memory
from liveweight.engine.models.forward import Solo
from liveweight.engine.models.model import build
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.rank.checkpoint_loading import load
from liveweight.spec.region import counts
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.restore import RestoreResult, restore
from liveweight.worker.targets.torch_target import module_target
from tests.paddle.conftest import PaddleSide
from tests.support.engine.engines import Dtype, Models
from tests.support.layouts import view
from tests.support.snapshots import FULL, SPECS, region, same, save_label, sharded, weights

pytestmark = pytest.mark.timeout(600)


def test_the_other_environment_has_paddle_and_no_torch(paddle_side: PaddleSide) -> None:
    assert paddle_side("environment") == {"paddle": "3.3.1", "torch": False}


def shards(label: int, rank: int, world: int) -> dict[str, Any]:
    """A rank's shards of what a label stands for, as the process with Paddle tells tensors."""
    memory, found = weights(label), {}
    for placement, spec in zip(sharded(rank, world).placements, SPECS, strict=True):
        found[spec.name] = {
            "dtype": spec.dtype.value,
            "shape": list(counts(region(spec, rank, world))),
            "bytes": np.ascontiguousarray(view(memory, placement, spec.dtype.size_bytes)).tobytes().hex(),
        }
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_parts_that_we_wrote_load_in_paddle_bit_for_bit(
    paddle_side: PaddleSide, tmp_path: Path, world: int
) -> None:
    directory = save_label(Store(tmp_path), 7, world=world)
    for rank in range(world):
        parts = sorted(directory.glob(f"model_state.tp{rank}.{rank}.part*.pdparams"))
        assert len(parts) > 1
        loaded: dict[str, Any] = {}
        for part in parts:
            loaded |= paddle_side("load", path=str(part))
        assert loaded == shards(7, rank, world)


LEVELS = {
    "parts": "model_state.tp0.0.part{number}.pdparams",
    "single": "model_state.tp0.0.pdparams",
    "legacy": "model_state.tp00.pdparams",
    "shared": "model_state.tp0.0.pdparams",
}


@pytest.mark.parametrize("level", LEVELS)
def test_files_that_paddle_wrote_are_read_at_every_level(
    paddle_side: PaddleSide, tmp_path: Path, level: str
) -> None:
    here, shared = tmp_path / "model", tmp_path / "shared"
    here.mkdir()
    shared.mkdir()
    place, tensors = shared if level == "shared" else here, shards(7, 0, 1)
    cuts = [{name: tensors[name]} for name in tensors] if level == "parts" else [tensors]
    for number, cut in enumerate(cuts):
        paddle_side("save", path=str(place / LEVELS[level].format(number=number)), tensors=cut)
    memory = np.zeros(FULL.memories_bytes[0], dtype=np.uint8)
    report = restore(here, sharded(0, 1), [Memory.from_array(memory)], shared=shared)
    assert isinstance(report, RestoreResult)
    assert (report.level, report.verified, report.version) == (level, False, None)
    assert len(report.files) == len(cuts)
    assert same(memory, weights(7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_that_paddle_wrote_restores_in_the_engines_model(
    paddle_side: PaddleSide, models: Models, tmp_path: Path, dtype: Dtype
) -> None:
    """The engine's own parameters, fused as they are, filled from Paddle's file: as if loaded from the checkpoint."""
    directory = models.directory(dtype=dtype)
    new = models.directory(seed=1, dtype=dtype)
    paddle_side(
        "copy", source=str(new / "model.safetensors"), target=str(tmp_path / "model_state.tp0.0.pdparams")
    )
    spec = ModelSpec.read(directory)
    built = [build(spec, Solo(), dtype=getattr(torch, dtype), device="cpu", draft=False) for _ in range(2)]
    load(built[0], directory)
    load(built[1], new)
    restored, wanted = (dict(model.named_parameters()) for model in built)
    assert not all(torch.equal(restored[name], wanted[name]) for name in wanted)
    target = module_target(built[0], built[0].pieces())
    report = restore(tmp_path, target.layout, target.shadow(), shared=None)
    assert isinstance(report, RestoreResult)
    assert (report.level, report.verified) == ("single", False)
    target.swap()
    after = dict(built[0].named_parameters())
    assert [name for name in wanted if not torch.equal(after[name], wanted[name])] == []
    assert load_file(new / "model.safetensors")["model.embed_tokens.weight"].dtype is getattr(torch, dtype)
