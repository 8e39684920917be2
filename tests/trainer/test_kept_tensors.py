"""Kept sets: a trainer leaves tensors out on purpose, and engines keep theirs, if they are the trainer's or those of the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import liveweight as lw
from liveweight.errors import KeptDiffers, ManifestMismatch, Refused, RoundFailed
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import RoundOpened, StagingBegan
from tests.support.stepping import publisher, serving

NAMES = ("visual.weight", "visual.bias", "head.weight")


class Net(nn.Module):
    """A frozen tower and a trained head."""

    def __init__(self, head: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.visual = nn.Linear(3, 4).requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 2, bias=False)
        nn.init.constant_(self.head.weight, head)


def held(net: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What an engine holds that was started from the same checkpoint."""
    return {name: tensor.detach().to(dtype).clone() for name, tensor in net.state_dict().items()}


@contextmanager
def scene(live: dict[str, torch.Tensor], where: Path, **options: Any) -> Iterator[tuple[str, Recorder]]:
    bus, seen = Bus(), Recorder()
    with bus.subscribe(seen), serving(live, where, bus, **options) as address:
        yield address, seen


@pytest.mark.parametrize("keep", ["frozen", ["visual.*"], ["visual.weight", "visual.b*"]])
@pytest.mark.parametrize("shadow", ["device", "none"])
def test_an_engine_keeps_what_the_trainer_leaves_out(short_path: Path, keep: Any, shadow: str) -> None:
    net = Net()
    live = held(net)
    tower = live["visual.weight"].clone()
    with (
        scene(live, short_path, shadow=shadow) as (address, _),
        publisher(net, address, short_path, keep=keep) as sender,
    ):
        for step in (1, 2):
            with torch.no_grad():
                net.head.weight.fill_(float(step + 1))
            report = sender.publish(step)
            assert report.replicas[0].staged_bytes == net.head.weight.nbytes
            assert report.replicas[0].kept == ("frozen" if keep == "frozen" else ", ".join(keep),)
            assert torch.equal(live["head.weight"], net.head.weight)
            assert torch.equal(live["visual.weight"], tower)
        assert sender.verify().match
        if shadow == "device":
            sender.undo()
            assert torch.equal(live["head.weight"], torch.full((2, 4), 2.0))
            assert torch.equal(live["visual.weight"], tower)
            sender.publish(3)


def test_a_kept_tensor_that_differs_is_refused_by_name_before_the_first_byte(short_path: Path) -> None:
    net = Net()
    live = held(net)
    live["visual.bias"][1] += 1.0
    with scene(live, short_path) as (address, seen):
        with pytest.raises(KeptDiffers, match=r"differ from the trainer's: visual\.bias$"):
            publisher(net, address, short_path, keep="frozen")
        assert not seen.of(RoundOpened)
        assert not seen.of(StagingBegan)
        # A publisher that leaves nothing out heals it.
        with publisher(net, address, short_path) as sender:
            sender.publish(1)
        with publisher(net, address, short_path, keep="frozen") as sender:
            sender.publish(2)


def test_kept_tensors_are_compared_in_the_engines_dtype(short_path: Path) -> None:
    net = Net()
    live = held(net, torch.bfloat16)
    with (
        scene(live, short_path) as (address, _),
        publisher(net, address, short_path, keep="frozen") as sender,
    ):
        sender.publish(1)
    assert torch.equal(live["head.weight"], net.head.weight.bfloat16())


def test_what_the_trainer_does_not_have_must_be_what_the_engine_started_with(short_path: Path) -> None:
    net = Net()
    live = held(net)
    with scene(live, short_path) as (address, _):
        only = {"head.weight": torch.full((2, 4), 3.0)}
        with publisher(only, address, short_path, keep=["visual.*"]) as sender:
            sender.publish(1)
            # Another publisher replaces the tower: from now on it is not the one of the start.
            with publisher(held(Net()) | {"visual.bias": torch.ones(4)}, address, short_path) as other:
                other.publish(1)
            only["head.weight"].fill_(4.0)
            with pytest.raises(
                RoundFailed, match=r"LW-113.*changed since the engine was started: visual\.weight"
            ):
                sender.publish(2)
        with pytest.raises(KeptDiffers, match="visual"):
            publisher(only, address, short_path, keep=["visual.*"])
    assert torch.equal(live["visual.bias"], torch.ones(4))


def test_a_tower_that_another_publisher_replaced_is_compared_again(short_path: Path) -> None:
    net = Net()
    live = held(net)
    with (
        scene(live, short_path) as (address, _),
        publisher(net, address, short_path, keep="frozen") as sender,
    ):
        sender.publish(1)
        with publisher(held(net) | {"visual.bias": torch.ones(4)}, address, short_path) as other:
            other.publish(1)
        with torch.no_grad():
            net.head.weight.fill_(5.0)
        with pytest.raises(RoundFailed, match=r"LW-113.*visual\.bias"):
            sender.publish(2)
        with publisher(held(net), address, short_path) as other:
            other.publish(2)
        sender.publish(2)
    assert torch.equal(live["head.weight"], torch.full((2, 4), 5.0))


def test_anything_else_that_is_missing_is_refused_by_name(short_path: Path) -> None:
    with scene(held(Net()), short_path) as (address, _):
        with pytest.raises(ManifestMismatch, match=r"head\.weight missing"):
            publisher({"visual.bias": torch.zeros(4)}, address, short_path, keep=["visual.weight"])
        with pytest.raises(ManifestMismatch, match=r"visual\.bias missing"):
            publisher({"head.weight": torch.zeros(2, 4)}, address, short_path, keep=["visual.weight"])


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (["visuel.*"], r"'visuel\.\*' fits no tensor"),
        (["head.*"], r"head\.weight requires a gradient"),
        ("visual.*", "keep is 'frozen', or a list"),
    ],
)
def test_a_keep_that_cannot_be_meant_is_refused(short_path: Path, keep: Any, why: str) -> None:
    net = Net()
    with scene(held(net), short_path) as (address, _), pytest.raises(Refused, match=why):
        publisher(net, address, short_path, keep=keep)


def test_frozen_needs_parameters_and_leaves_something_to_publish(short_path: Path) -> None:
    net = Net()
    with scene(held(net), short_path) as (address, _):
        with pytest.raises(Refused, match="needs a torch module"):
            publisher(held(net), address, short_path, keep="frozen")
        with pytest.raises(Refused, match="every tensor"):
            publisher(net.requires_grad_(requires_grad=False), address, short_path, keep="frozen")


def test_a_kept_parameter_that_is_trained_later_is_refused_at_the_next_offer(short_path: Path) -> None:
    net = Net()
    with (
        scene(held(net), short_path) as (address, _),
        publisher(net, address, short_path, keep="frozen") as sender,
    ):
        sender.publish(1)
        net.visual.bias.requires_grad_()
        with pytest.raises(Refused, match=r"visual\.bias is kept by the engines, and requires a gradient"):
            sender.publish(2)


def test_a_mapping_gives_the_content_that_engines_must_have(short_path: Path) -> None:
    net = Net()
    tower = {name: tensor for name, tensor in held(net).items() if name.startswith("visual")}
    only = {"head.weight": torch.full((2, 4), 3.0)}
    live = held(net)
    with scene(live, short_path) as (address, _):
        with publisher(only, address, short_path, keep=tower) as sender:
            sender.publish(1)
        tower["visual.bias"] = tower["visual.bias"] + 1
        with pytest.raises(KeptDiffers, match=r"visual\.bias"):
            publisher(only, address, short_path, keep=tower)
    assert torch.equal(live["head.weight"], only["head.weight"])


def test_a_live_offer_leaves_them_out_too(short_path: Path) -> None:
    net = Net()
    live = held(net)
    with (
        scene(live, short_path) as (address, _),
        lw.share_module(net) as shared,
        publisher(shared, address, short_path, offer="live", keep="frozen") as sender,
    ):
        with torch.no_grad():
            net.head.weight.fill_(9.0)
        report = sender.publish(1)
        assert (report.offer, report.replicas[0].staged_bytes) == ("live", net.head.weight.nbytes)
        assert torch.equal(live["head.weight"], net.head.weight)


def test_a_ring_offer_leaves_them_out_too(short_path: Path) -> None:
    net = Net()
    live = held(net)
    with (
        scene(live, short_path) as (address, _),
        publisher(net, address, short_path, offer="ring", keep="frozen") as sender,
    ):
        with torch.no_grad():
            net.head.weight.fill_(9.0)
        assert sender.publish(1).offer == "ring"
        assert torch.equal(live["head.weight"], net.head.weight)


def test_names_that_are_one_tensor_in_the_engine_are_kept_together(short_path: Path) -> None:
    tied = nn.Module()
    tied.embed = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
    tied.head = tied.embed
    tied.norm = nn.Parameter(torch.ones(3), requires_grad=False)
    source = {"embed": torch.zeros(4, 3), "head": torch.ones(4, 3), "norm": torch.ones(3)}
    with (
        serving(tied, short_path) as address,  # type: ignore[arg-type]
        pytest.raises(Refused, match="embed and head are one tensor in the engine"),
    ):
        publisher(source, address, short_path, keep=["embed"])


@pytest.mark.parametrize("given", ["names", "content"])
def test_an_iterator_brings_only_what_is_trained(short_path: Path, given: str) -> None:
    net = Net()
    live = held(net)
    tower = {name: tensor.clone() for name, tensor in live.items() if name.startswith("visual")}
    keep: Any = ["visual.*"] if given == "names" else tower
    with (
        scene(live, short_path) as (address, _),
        publisher(None, address, short_path, keep=keep) as sender,
    ):
        for step in (1, 2):
            with torch.no_grad():
                net.head.weight.fill_(float(step + 1))
            trained = ((name, one) for name, one in net.named_parameters() if one.requires_grad)
            assert sender.publish(step, tensors=trained).replicas[0].staged_bytes == net.head.weight.nbytes
            assert torch.equal(live["head.weight"], net.head.weight)
        assert sender.verify().match
        with pytest.raises(ManifestMismatch, match=r"visual\.weight unexpected"):
            sender.publish(3, tensors=net.named_parameters())
        with pytest.raises(ManifestMismatch, match=r"head\.weight missing"):
            sender.publish(4, tensors=iter(()))
    assert all(torch.equal(live[name], tensor) for name, tensor in tower.items())


def test_an_iterators_keep_is_compared_and_needs_engines_that_say_what_they_have(short_path: Path) -> None:
    net = Net()
    live = held(net)
    tower = {name: tensor + 1 for name, tensor in live.items() if name == "visual.bias"}
    with scene(live, short_path) as (address, seen):
        with (
            pytest.raises(KeptDiffers, match=r"visual\.bias$"),
            publisher(None, address, short_path, keep=tower),
        ):
            pass
        with pytest.raises(Refused, match="keep='frozen' needs a torch module"):
            publisher(None, address, short_path, keep="frozen")
        assert not seen.of(RoundOpened)
    with pytest.raises(Refused, match="keep needs a model, or engines"):
        lw.Publisher(address=f"ipc://{short_path}/pulled", keep=["visual.*"], secret=short_path / "secret")
