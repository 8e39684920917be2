"""Experts that a module holds stacked: offered one by one where an engine wants that, without a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from liveweight.checkpoint import SINGLE, CheckpointSource
from liveweight.errors import ManifestMismatch
from liveweight.spec.dtype import DType
from liveweight.spec.layout import packed
from liveweight.spec.manifest import Manifest, TensorSpec, compare
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.in_memory import ModuleSource, StateDictSource
from liveweight.trainer.sources.source import one_pass, whole_pass
from liveweight.trainer.sources.stacked_experts import (
    SplitSource,
    checkpoint_manifest,
    split_layout,
    split_manifest,
    splits_for,
)
from tests.support.engine.engines import Models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, as checkpoints have it."""
    return Models(tmp_path_factory.mktemp("models")).directory("qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def module(checkpoint: Path) -> nn.Module:
    """The same weights in transformers' own module, which has its experts stacked."""
    from transformers import AutoModelForCausalLM

    made: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert "model.layers.0.mlp.experts.gate_up_proj" in made.state_dict()
    return made


def test_the_parts_are_what_the_checkpoint_has_under_its_names(module: nn.Module, checkpoint: Path) -> None:
    source, expected = ModuleSource(module), CheckpointSource(checkpoint).manifest()
    splits = splits_for(source.manifest(), expected)
    split = SplitSource(source, splits)
    compare(expected, split.manifest())
    assert checkpoint_manifest(source.manifest()) == split.manifest()
    found = dict(
        zip(
            (spec.name for spec in split.manifest()),
            whole_pass(split, [spec.name for spec in split.manifest()]),
            strict=True,
        )
    )
    for name, tensor in load_file(checkpoint / SINGLE).items():
        part = found[name]
        assert isinstance(part, torch.Tensor)
        assert torch.equal(part, tensor), name


def test_the_parts_lie_in_the_stacked_parameters(module: nn.Module, checkpoint: Path) -> None:
    source = ModuleSource(module)
    splits = splits_for(source.manifest(), CheckpointSource(checkpoint).manifest())
    assert len(splits) == 2 * 4
    stacked = {name: module.get_parameter(name) for name in splits}
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in stacked.values()]
    parts = {part.name for of_one in splits.values() for part in of_one}
    lying = [tensor.data_ptr() for name, tensor in SplitSource(source, splits).tensors() if name in parts]
    assert len(lying) == len(parts) == 4 * 8 * 3
    assert all(any(start <= address < end for start, end in spans) for address in lying)
    assert len(set(lying)) == len(lying)


def test_the_parts_of_a_host_tensor_lie_where_torchs_do() -> None:
    name = "experts.gate_up_proj"
    stacked = torch.arange(3.0 * 4 * 5).reshape(5, 3, 4).permute(1, 2, 0)
    found = HostTensor(
        address=stacked.data_ptr(),
        dtype=DType.FLOAT32,
        shape=tuple(stacked.shape),
        strides=tuple(stacked.stride()),
        owner=stacked,
    )
    places = []
    for tensor in (stacked, found):
        source = StateDictSource({name: tensor})
        splits = splits_for(source.manifest(), checkpoint_manifest(source.manifest()))
        parts = dict(SplitSource(source, splits).tensors())
        places.append({part: (t.data_ptr(), tuple(t.shape), t.stride()) for part, t in parts.items()})
    assert len(places[0]) == 6
    assert places[0] == places[1]


def test_a_layout_of_whole_tensors_becomes_one_of_their_parts() -> None:
    stacks = [
        TensorSpec(name="experts.gate_up_proj", dtype=DType.FLOAT32, shape=(3, 4, 5)),
        TensorSpec(name="norm", dtype=DType.FLOAT32, shape=(7,)),
        TensorSpec(name="a.experts.down_proj", dtype=DType.FLOAT32, shape=(2, 5, 2)),
    ]
    layout = packed(stacks)
    expected = checkpoint_manifest(Manifest(tensors=tuple(stacks)))
    splits = splits_for(layout.manifest(), expected)
    split = split_layout(layout, splits)
    assert split.manifest() == expected
    memory = torch.arange(layout.memories_bytes[0], dtype=torch.uint8)
    whole = {
        p.name: memory[p.offset_bytes :][: s.size_bytes].view(torch.float32).view(s.shape)
        for p, s in zip(layout.placements, layout.tensors, strict=True)
    }
    for placement, (name, part) in zip(
        split.placements, SplitSource(StateDictSource(whole), splits).tensors(), strict=True
    ):
        assert placement.name == name
        assert part.data_ptr() - memory.data_ptr() == placement.offset_bytes
        assert part.is_contiguous()


def test_an_engine_that_holds_its_experts_stacked_is_offered_them_so(module: nn.Module) -> None:
    own = ModuleSource(module).manifest()
    assert splits_for(own, own) == {}
    assert split_manifest(own, {}) is own


def test_strided_stacks_and_streams_give_the_same_parts() -> None:
    stack = torch.randn(2, 3, 6).transpose(1, 2)  # [2, 6, 3], not contiguous
    state = {"experts.gate_up_proj": stack}
    expected = checkpoint_manifest(StateDictSource(state).manifest())
    splits = splits_for(StateDictSource(state).manifest(), expected)
    split = SplitSource(StateDictSource(state), splits)
    names = [spec.name for spec in expected]
    assert names == [f"experts.{e}.{kind}_proj.weight" for e in (0, 1) for kind in ("gate", "up")]
    parts = list(one_pass(split, names))
    for number, part in enumerate(parts):
        expert, half = divmod(number, 2)
        assert isinstance(part, torch.Tensor)
        assert torch.equal(part, stack[expert, 3 * half : 3 * half + 3])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("experts.gate_up_proj", (2, 5, 3)),  # no two halves
        ("experts.gate_up_proj", (6, 4)),
        ("expert.gate_up_proj", (2, 4, 3)),
        ("experts.gate_up_proj.weight", (2, 4, 3)),
        ("experts.gate_up_proj", (0, 4, 3)),
    ],
)
def test_what_is_no_stack_of_experts_is_left_alone(name: str, shape: tuple[int, ...]) -> None:
    own = StateDictSource({name: torch.zeros(shape)}).manifest()
    assert checkpoint_manifest(own) == own


def test_a_stack_with_too_few_experts_is_refused_by_the_names_that_are_missing() -> None:
    state = {"experts.down_proj": torch.zeros(2, 4, 3)}
    expected = checkpoint_manifest(StateDictSource({"experts.down_proj": torch.zeros(3, 4, 3)}).manifest())
    own = StateDictSource(state).manifest()
    with pytest.raises(ManifestMismatch, match=r"experts.2.down_proj.weight missing"):
        compare(expected, split_manifest(own, splits_for(own, expected)))
