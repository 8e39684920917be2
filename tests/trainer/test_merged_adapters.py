"""A PEFT model is offered with its LoRA merged: the bits of `merge_and_unload()` of a copy, and the base is not touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from liveweight.errors import ManifestInvalid
from liveweight.observe.bus import Bus
from liveweight.observe.events import LiveOfferImpossible
from liveweight.trainer.sources.in_memory import as_source
from liveweight.trainer.sources.merged_adapters import MergedSource
from liveweight.trainer.sources.source import check_tensor, one_pass
from tests.support.stepping import publisher, serving

peft = pytest.importorskip("peft", reason="a PEFT model is what is published here")
BASES = [torch.bfloat16, torch.float16, torch.float32]


class Net(nn.Module):
    """Layers that LoRA knows, and some that it leaves alone."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.q = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16))
        self.head = nn.Linear(16, 12)
        self.register_buffer("scale", torch.tensor(2.5))
        self.to(dtype)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.block(self.q(self.embed(ids))))


def adapted(net: nn.Module, seed: int = 1, **config: Any) -> Any:
    """A PEFT model whose adapters are not zero."""
    config = {"target_modules": ["embed", "q", "block.0"], "r": 4, "lora_alpha": 7, **config}
    model = peft.get_peft_model(net, peft.LoraConfig(**config))
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def read(model: object) -> dict[str, Tensor]:
    """One checked pass over the model's source, every name."""
    source = as_source(model)
    manifest = source.manifest()
    found: dict[str, Tensor] = {}
    names = [spec.name for spec in manifest]
    for spec, tensor in zip(manifest, one_pass(source, names), strict=True):
        check_tensor(spec, tensor)
        assert isinstance(tensor, Tensor)
        found |= dict.fromkeys(spec.names, tensor.detach().clone())
    return found


def merged(model: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = copy.deepcopy(model).merge_and_unload().state_dict()
    return state


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", BASES, ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"modules_to_save": ["head"]},
        {"target_modules": ["q"], "lora_bias": True},
        {"target_modules": ["q"], "rank_pattern": {"q": 2}, "alpha_pattern": {"q": 3}},
    ],
    ids=["plain", "rslora", "modules_to_save", "bias", "patterns"],
)
def test_a_lora_model_is_offered_as_merge_and_unload_of_a_copy_leaves_it(
    config: dict[str, Any], dtype: torch.dtype
) -> None:
    model = adapted(Net(dtype), **config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = merged(model)
    assert not torch.equal(wanted["q.weight"], before["base_model.model.q.base_layer.weight"])
    assert_same(read(model), wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_several_active_adapters_are_added_in_their_order() -> None:
    model = adapted(Net())
    model.add_adapter("second", peft.LoraConfig(target_modules=["q", "head"], r=2))
    fill(model, 3)
    model.base_model.set_adapter(["second", "default"])
    assert_same(read(model), merged(model))
    model.base_model.set_adapter("second")
    assert_same(read(model), merged(model))


def test_a_merged_model_is_offered_as_it_lies_and_an_unmerged_one_again_with_its_sums() -> None:
    model = adapted(Net(torch.float32))
    wanted = merged(model)
    held = [as_source(model).held]
    model.merge_adapter()
    held.append(as_source(model).held)
    assert_same(read(model), wanted)
    model.unmerge_adapter()
    assert [*held, as_source(model).held] == [False, True, False]


def test_a_hundred_versions_leave_a_bf16_base_as_it_was() -> None:
    model = adapted(Net())
    base = {name: tensor.clone() for name, tensor in model.state_dict().items() if "base_layer" in name}
    for step in range(100):
        fill(model, step)
        read(model)
    assert base
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())
    model.merge_adapter()
    model.unmerge_adapter()
    assert not all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled": compiled,
    "ddp, compiled": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
    "compiled, ddp": lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.usefixtures("one_rank_group")
def test_wrappers_around_a_lora_model_change_nothing(wrapping: str) -> None:
    model = adapted(Net(torch.float32))
    wanted = merged(model)
    assert_same(read(WRAPPINGS[wrapping](model)), wanted)


def test_a_lora_model_inside_another_module_has_the_names_of_the_model_without_peft() -> None:
    model = adapted(Net())
    outer = nn.ModuleDict({"policy": model, "value": nn.Linear(2, 1)})
    assert list(read(outer)) == [*(f"policy.{name}" for name in merged(model)), "value.weight", "value.bias"]


def tied() -> Net:
    net = Net()
    net.block = nn.Sequential(nn.Identity())
    net.head = nn.Linear(8, 12, bias=False)
    net.head.weight = net.embed.weight
    return net


def test_tied_weights_stay_tied_unless_an_adapter_parts_them() -> None:
    together = as_source(adapted(tied(), target_modules=["q"])).manifest()
    assert {spec.name: spec.aliases for spec in together}["embed.weight"] == ("head.weight",)
    model = adapted(tied(), target_modules=["embed"])
    assert {"embed.weight", "head.weight"} <= {spec.name for spec in as_source(model).manifest()}
    found = read(model)
    assert torch.equal(found["head.weight"], model.base_model.model.head.weight)
    assert not torch.equal(found["embed.weight"], found["head.weight"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True, "target_modules": ["q"]}, "q is trained by PEFT's DoraLinearVariant"),
    "tokens": ({"trainable_token_indices": {"embed": [1]}, "target_modules": ["q"]}, "embed is trained by"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_merged_on_the_way_is_refused_by_name_and_the_remedy_works(case: str) -> None:
    config, named = REFUSED[case]
    model = adapted(Net(torch.float32), **config)
    with pytest.raises(ManifestInvalid, match=named) as caught:
        as_source(model).manifest()
    assert "copy.deepcopy(model).merge_and_unload().state_dict()" in str(caught.value)
    assert list(read(merged(model))) == list(merged(model))


def test_another_tuner_is_refused_until_it_is_merged() -> None:
    config = peft.IA3Config(target_modules=["q"], feedforward_modules=[])
    model = peft.get_peft_model(Net(torch.float32), config)
    for parameter in model.parameters():
        parameter.data += 0.5
    wanted = merged(model)
    with pytest.raises(ManifestInvalid, match="q is trained by PEFT's Linear"):
        as_source(model).manifest()
    model.merge_adapter()
    assert_same(read(model), wanted)


@pytest.mark.parametrize("offer", ["frozen", "live", "ring"])
def test_a_lora_model_is_published_and_the_engine_holds_its_merged_weights(
    short_path: Path, offer: Any
) -> None:
    model, bus, reasons = adapted(Net(), modules_to_save=["head"]), Bus(), list[str]()
    live = {name: torch.zeros_like(tensor) for name, tensor in Net().state_dict().items()}

    def note(event: object) -> None:
        if isinstance(event, LiveOfferImpossible):
            reasons.append(event.reason)

    with (
        bus.subscribe(note),
        serving(live, short_path) as address,
        publisher(model, address, short_path, offer=offer, bus=bus) as sender,
    ):
        for step in range(3):
            fill(model, step)
            report = sender.publish(step)
            assert (report.offer, report.verified) == ("frozen", True)
            assert_same(live, merged(model))
    assert len(reasons) == (0 if offer == "frozen" else 1)


@pytest.mark.usefixtures("one_rank_group")
def test_a_lora_model_with_a_group_is_published_too(short_path: Path) -> None:
    model = adapted(Net())
    live = {name: torch.zeros_like(tensor) for name, tensor in Net().state_dict().items()}
    ddp = nn.parallel.DistributedDataParallel(model)
    with (
        serving(live, short_path) as address,
        publisher(ddp, address, short_path, group=dist.group.WORLD) as sender,
    ):
        assert sender.publish(1).verified
        assert_same(live, merged(model))


def test_a_module_without_adapters_is_no_such_source() -> None:
    assert not isinstance(as_source(Net()), MergedSource)
