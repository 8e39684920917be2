"""A shared module trains on as before, its parameters are the arena's bytes, and the reason against a live offer is given in words."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import OutOfMemory, Refused, Unavailable, WrongState
from liveweight.spec.digest import partial
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.trainer.offers.live import SharedModule, live_digest, share_module, why_not_live
from liveweight.trainer.sources.in_memory import IteratorSource, ModuleSource, as_source
from liveweight.trainer.sources.tensors import bytes_of, torch_dtypes, view
from liveweight.transports.ipc.arena import SharedArena


class Net(nn.Module):
    """Tied, transposed, empty and scalar tensors, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.body.weight.data = torch.randn(4, 4).t()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("steps", torch.tensor([3], dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens)))) * self.scale  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def shared(net: Net) -> Iterator[SharedModule]:
    with share_module(net, SharedArena) as shared:
        yield shared


def train(net: Net, optimiser: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimiser.zero_grad()
        net(torch.arange(7)).square().sum().add(step).backward()
        optimiser.step()


def in_arena(shared: SharedModule, name: str) -> Tensor:
    """What the arena's bytes say a tensor is."""
    index = [spec.name for spec in shared.manifest].index(name)
    spec, placement = shared.manifest.tensors[index], shared.layout.placements[index]
    return view(bytes_of(shared.arena.memory), placement, spec).clone()


def arena_bytes(shared: SharedModule) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    owner = shared.arena.memory.owner
    assert isinstance(owner, np.ndarray)
    return owner


def is_closed(arena: SharedArena) -> bool:
    try:
        return not arena.memory
    except WrongState:
        return True


def values(net: Net) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_sharing_keeps_objects_values_and_gradients_and_moves_the_memory(net: Net) -> None:
    net(torch.arange(7)).sum().backward()
    before, objects, gradient = values(net), dict(net.named_parameters()), net.body.weight.grad
    with share_module(net, SharedArena) as shared:
        assert dict(net.named_parameters()) == objects
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
        assert net.body.weight.grad is gradient
        assert [p.requires_grad for p in net.parameters()] == [p is not net.frozen for p in net.parameters()]
        assert net.body.weight.is_contiguous()
        assert net.head.weight is net.embed.weight
        assert "head.weight" in shared.manifest.by_name()
        assert all(torch.equal(in_arena(shared, spec.name), before[spec.name]) for spec in shared.manifest)
        assert why_not_live(as_source(net), shared.manifest, shared) is None


def test_tensors_tied_by_memory_and_not_by_object_stay_tied(net: Net) -> None:
    net.head.weight = nn.Parameter(net.embed.weight.data)
    with share_module(net, SharedArena):
        assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()
        net.embed.weight.data.fill_(5)
        assert (net.head.weight == 5).all()
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_goes_on_and_the_arena_sees_every_step(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    def run(share: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = Net()
        optimiser = kind(net.parameters(), lr=0.001)
        train(net, optimiser)
        if not share:
            train(net, optimiser)
            return values(net)
        with share_module(net, SharedArena) as shared:
            train(net, optimiser)
            assert why_not_live(as_source(net), shared.manifest, shared) is None
            return {spec.name: in_arena(shared, spec.name) for spec in shared.manifest}

    alone = run(share=False)
    assert all(torch.allclose(tensor, alone[name]) for name, tensor in run(share=True).items())


def test_loading_a_state_dict_writes_through_to_the_arena(net: Net, shared: SharedModule) -> None:
    torch.manual_seed(1)
    other = Net()
    net.load_state_dict(other.state_dict())
    assert torch.equal(in_arena(shared, "body.weight"), other.body.weight)
    assert why_not_live(as_source(net), shared.manifest, shared) is None


def test_closing_moves_everything_back_and_trains_on(net: Net) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    arena: list[SharedArena] = []

    def allocate(size_bytes: int) -> SharedArena:
        arena.append(SharedArena(size_bytes))
        return arena[0]

    shared = share_module(net, allocate)
    train(net, optimiser)
    trained, start = values(net), shared.arena.memory.address
    end = start + shared.arena.memory.size_bytes
    shared.close()
    shared.close()
    assert is_closed(arena[0])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in net.state_dict().items())
    assert not any(start <= tensor.data_ptr() < end for tensor in net.state_dict().values())
    assert net.head.weight is net.embed.weight
    train(net, optimiser)
    assert (
        why_not_live(as_source(net), shared.manifest, shared) == "the module was moved back to private memory"
    )


def test_closing_leaves_alone_what_was_moved_meanwhile(net: Net, shared: SharedModule) -> None:
    net.body.bias.data = moved = torch.full((4,), 9.0)
    shared.close()
    assert net.body.bias.data_ptr() == moved.data_ptr()


def test_a_failed_allocation_leaves_the_module_as_it_was(net: Net) -> None:
    places = [p.data_ptr() for p in net.parameters()]

    def none_left(size_bytes: int) -> SharedArena:
        raise OutOfMemory(f"no {size_bytes} bytes")

    with pytest.raises(OutOfMemory):
        share_module(net, none_left)
    assert [p.data_ptr() for p in net.parameters()] == places


class Stubborn(Tensor):
    """A tensor that does not let its memory be exchanged."""

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        raise RuntimeError(f"no {list(other.shape)} for me")


def test_a_failed_move_leaves_the_module_as_it_was(net: Net) -> None:
    net.register_buffer("stubborn", torch.zeros(2).as_subclass(Stubborn))
    before, places = values(net), [tensor.data_ptr() for tensor in net.state_dict().values()]
    arenas: list[SharedArena] = []

    def allocate(size_bytes: int) -> SharedArena:
        arenas.append(SharedArena(size_bytes))
        return arenas[-1]

    with pytest.raises(Unavailable, match=r"stubborn cannot be moved: no \[2\] for me"):
        share_module(net, allocate)
    assert [tensor.data_ptr() for tensor in net.state_dict().values()] == places
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [is_closed(arena) for arena in arenas] == [True]


def test_a_closed_arena_is_unmapped(net: Net) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:")

    before = mapped()
    shared = share_module(net, SharedArena)
    live_digest(shared, choose_kernels(), 1)
    assert mapped() > before
    shared.close()
    gc.collect()
    assert mapped() == before


def test_tensors_that_lie_across_each_other_are_refused(net: Net) -> None:
    whole = torch.zeros(10)
    net.first, net.second = nn.Parameter(whole[:6]), nn.Parameter(whole[4:])
    with pytest.raises(Refused, match=r"first and second"):
        share_module(net, SharedArena)


# Why not live.


def cast(manifest: Manifest, name: str, dtype: torch.dtype) -> Manifest:
    new = {theirs: ours for ours, theirs in torch_dtypes().items()}[dtype]
    specs = (
        TensorSpec(name=s.name, dtype=new if s.name == name else s.dtype, shape=s.shape, aliases=s.aliases)
        for s in manifest
    )
    return Manifest(tensors=tuple(specs))


def half(net: Net) -> None:
    net.half()


def away(net: Net) -> None:
    net.body.bias.data = net.body.bias.data.clone()


def replaced(net: Net) -> None:
    net.scale = nn.Parameter(torch.tensor(1.0))


def reshaped(net: Net) -> None:
    net.body.weight.data = net.body.weight.data.t()


def grown(net: Net) -> None:
    net.more = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [(half, "float16"), (away, "body.bias"), (replaced, "scale"), (reshaped, "body.weight"), (grown, "more")],
)
def test_what_was_moved_out_of_the_arena_is_named(
    net: Net, shared: SharedModule, change: Callable[[Net], None], named: str
) -> None:
    source = as_source(net)
    assert why_not_live(source, shared.manifest, shared) is None
    change(net)
    reason = why_not_live(source, shared.manifest, shared)
    assert reason is not None
    assert named in reason or change is grown


def test_a_dtype_that_the_engine_expects_otherwise_is_named(net: Net, shared: SharedModule) -> None:
    reason = why_not_live(as_source(net), cast(shared.manifest, "body.bias", torch.bfloat16), shared)
    assert reason == "body.bias is float32 and the engine expects bfloat16"


def test_other_sources_and_unshared_modules_say_why(net: Net, shared: SharedModule) -> None:
    expected = shared.manifest
    iterator = IteratorSource([("a", "float32", (1,))], list)
    assert why_not_live(iterator, expected, shared) == "the source is not a torch module"
    assert "share_module" in (why_not_live(as_source(net), expected, None) or "")
    assert why_not_live(ModuleSource(Net()), expected, shared) == "another module was shared"


@pytest.mark.parametrize("threads", [1, 3])
def test_live_digests_are_those_of_the_parameters_as_they_are_now(
    net: Net, shared: SharedModule, threads: int
) -> None:
    kernels = choose_kernels()
    for _ in range(2):
        lanes = live_digest(shared, kernels, threads)
        expected = [
            partial(arena_bytes(shared), placement, spec)
            for placement, spec in zip(shared.layout.placements, shared.layout.tensors, strict=True)
        ]
        assert np.array_equal(lanes, np.stack(expected))
        net.body.weight.data.add_(1)


def test_the_memory_of_the_arena_fulfils_its_port() -> None:
    arena = SharedArena(10)
    assert isinstance(arena.memory, Memory)
    assert arena.raise_generation() == arena.generation
