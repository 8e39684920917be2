"""Targets of torch tensors: what they declare, their shadow, and swaps that happen whole or not at all."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liveweight.devices.bounds import Memories
from liveweight.devices.kernels import BoundCopy, BoundDigest, BoundFreeze, Kernels, choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, OutOfMemory, Torn, WrongState
from liveweight.plan.copies import plan_copies
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import box, whole
from liveweight.spec.row_table import Table
from liveweight.worker.targets.swap import CHUNK_BYTES
from liveweight.worker.targets.torch_target import ExchangeMode, TensorTarget, module_target
from tests.support.layouts import Bytes

How = dict[str, Any]
HOWS: dict[str, How] = {
    **{mode: {"exchange": mode} for mode in get_args(ExchangeMode)},
    "host": {"shadow": "host"},
}
every_way = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
"""Both swaps, and a shadow on the host, which is a way of its own also where the device is the host."""


def bytes_of(memory: Memory) -> Bytes:
    """A memory as a writable array, by its address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * memory.size_bytes).from_address(memory.address))


def content(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in its own order, as bytes."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(dtype: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Any bits; for bool, only those that are one."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if kind is torch.bool else 256
    raw = torch.randint(0, high, (*shape, kind.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(kind).reshape(tuple(shape))


def fill(memories: Sequence[Memory], seed: int = 1) -> list[bytes]:
    rng = np.random.default_rng(seed)
    for memory in memories:
        bytes_of(memory)[:] = rng.integers(0, 2, memory.size_bytes, dtype=np.uint8)
    return [bytes_of(memory).tobytes() for memory in memories]


def stored(memories: Sequence[Memory]) -> list[bytes]:
    return [bytes_of(memory).tobytes() for memory in memories]


def publish(target: TensorTarget, tensors: Mapping[str, torch.Tensor], layout: Layout | None = None) -> None:
    """Stage full tensors into the shadow with the plan that a round would use."""
    specs = [
        TensorSpec(name=name, dtype=DType(str(t.dtype).removeprefix("torch.")), shape=tuple(t.shape))
        for name, t in tensors.items()
    ]
    source = packed(specs)
    arena = np.zeros(source.memories_bytes[0], dtype=np.uint8)
    for placement, tensor in zip(source.placements, tensors.values(), strict=True):
        raw = np.frombuffer(content(tensor), dtype=np.uint8)
        arena[placement.offset_bytes : placement.offset_bytes + len(raw)] = raw
    plan = plan_copies(source, layout or target.layout)
    copy = choose_kernels().bind_copy(plan.rows, [Memory.from_array(arena)], target.shadow())
    copy.run(0, len(plan.rows))


# Swaps.


@every_way
@pytest.mark.parametrize("dtype", [dtype.value for dtype in DType])
def test_a_swap_shows_the_shadow_and_a_second_one_takes_it_back(how: How, dtype: str) -> None:
    tensors = {
        "matrix": random_tensor(dtype, (5, 7)),
        "scalar": random_tensor(dtype, ()),
        "empty": random_tensor(dtype, (0, 3)),
        "transposed": random_tensor(dtype, (4, 6)).t(),
        "permuted": random_tensor(dtype, (2, 3, 4)).permute(2, 0, 1),
        "lone": random_tensor(dtype, (1, 9, 1)),
    }
    before = {name: content(tensor) for name, tensor in tensors.items()}
    target = TensorTarget(tensors, **how)
    live = stored(target.live())
    staged = fill(target.shadow())
    target.swap()
    assert stored(target.live()) == staged
    assert stored(target.shadow()) == live
    order = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    assert order == [memory.address for memory in target.live() if memory.size_bytes]
    assert all(content(t) != before[name] for name, t in tensors.items() if t.numel() > 4)
    target.swap()
    assert {name: content(tensor) for name, tensor in tensors.items()} == before
    assert stored(target.shadow()) == staged


def test_a_swap_moves_pointers_and_a_copy_moves_bytes() -> None:
    for name, how in HOWS.items():
        moves = name == "swap"
        tensor = torch.zeros(8)
        address, other = tensor.data_ptr(), tensor.view(2, 4)
        target = TensorTarget({"w": tensor}, **how)
        publish(target, {"w": torch.ones(8)})
        target.swap()
        assert (tensor.data_ptr() != address) is moves
        assert bool(other.eq(0).all()) is moves
        assert tensor.eq(1).all()


@every_way
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_chunks_and_memories_are_swapped_exactly(how: How, threads: int) -> None:
    sizes = [3 * CHUNK_BYTES + 17, 1, 0, CHUNK_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES + 1, *range(200)]
    tensors = {f"w{i}": random_tensor("uint8", (size,), i) for i, size in enumerate(sizes)}
    target = TensorTarget(tensors, **how, threads=threads)
    live, staged = stored(target.live()), fill(target.shadow())
    target.swap()
    assert stored(target.live()) == staged == [content(t) for t in tensors.values()]
    assert stored(target.shadow()) == live


@every_way
@pytest.mark.parametrize("count", [0, 2])
def test_targets_without_a_byte_are_swapped(how: How, count: int) -> None:
    target = TensorTarget({f"w{i}": torch.zeros(0, 3) for i in range(count)}, **how)
    assert [memory.size_bytes for memory in target.shadow()] == [0] * count
    target.swap()
    assert len(target.live()) == count


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(list(HOWS.values())))
def test_any_tensors_survive_any_number_of_swaps(data: st.DataObject, how: How) -> None:
    tensors = {}
    for number in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        dtype = data.draw(st.sampled_from([dtype.value for dtype in DType]))
        order = data.draw(st.permutations(range(len(shape))))
        tensors[f"w{number}"] = random_tensor(dtype, shape, number).permute(order)
    target = TensorTarget(tensors, **how, threads=2)
    sides = [stored(target.live()), fill(target.shadow())]
    shapes = {name: (tensor.shape, tensor.stride()) for name, tensor in tensors.items()}
    for number in range(data.draw(st.integers(0, 3))):
        target.swap()
        assert [stored(target.live()), stored(target.shadow())] == [
            sides[1 - number % 2],
            sides[number % 2],
        ]
    assert {name: (tensor.shape, tensor.stride()) for name, tensor in tensors.items()} == shapes


# Modules.


def linear_pair() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


@every_way
def test_a_module_computes_with_the_new_weights_and_stays_the_same_objects(how: How) -> None:
    module, other = linear_pair().eval(), linear_pair().eval()
    first, *_, last = module.parameters()
    first.requires_grad_(False)
    last.grad = gradient = torch.ones_like(last)
    objects = [(id(p), p.requires_grad, type(p), p._version) for p in module.parameters()]
    target = module_target(module, **how)
    assert [spec.name for spec in target.layout.tensors] == [
        *(name for name, _ in module.named_parameters()),
        *(name for name, _ in module.named_buffers()),
    ]
    x = torch.randn(3, 4)
    old, new = module(x), other(x)
    publish(target, other.state_dict())
    assert torch.equal(module(x), old)
    target.swap()
    assert torch.equal(module(x), new)
    assert [(id(p), p.requires_grad, type(p), p._version) for p in module.parameters()] == objects
    assert last.grad is gradient
    target.swap()
    assert torch.equal(module(x), old)


@every_way
def test_gradients_flow_into_the_memory_that_is_live(how: How) -> None:
    module = torch.nn.Linear(3, 1, bias=False)
    target = module_target(module, **how)
    publish(target, {"weight": torch.full((1, 3), 2.0)})
    target.swap()
    module(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert bytes_of(target.live()[0]).view(np.float32).tolist() == [1.0, 1.0, 1.0]


def test_non_persistent_buffers_and_parameters_without_pieces_take_no_part() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("computed", torch.ones(3), persistent=False)
    module.register_buffer("own", torch.ones(4))
    module.register_parameter("w", torch.nn.Parameter(torch.ones(5)))
    target = module_target(module, {"own": ()})
    assert [spec.name for spec in target.layout.tensors] == ["w", "kept"]


@every_way
@pytest.mark.parametrize("same_object", [True, False])
def test_tied_parameters_are_one_and_stay_tied(how: How, same_object: bool) -> None:
    module = torch.nn.Module()
    module.embed, module.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
    weight = module.embed.weight
    module.head.weight = weight if same_object else torch.nn.Parameter(weight.data)
    target = module_target(module, **how)
    assert [spec.names for spec in target.layout.tensors] == [("embed.weight", "head.weight")]
    assert len(target.live()) == 1
    new = torch.randn(6, 4)
    publish(target, {"head.weight": new})
    for expected in (new, weight.detach().clone()):
        target.swap()
        assert torch.equal(module.embed.weight, expected)
        assert torch.equal(module.head.weight, expected)
        assert module.embed.weight.data_ptr() == module.head.weight.data_ptr()


@every_way
def test_a_swap_under_inference_mode_leaves_plain_parameters(how: How) -> None:
    module = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        target = module_target(module, **how)
        fill(target.shadow())
        target.swap()
    assert not module.weight.is_inference()
    module(torch.ones(1, 2)).sum().backward()


@every_way
def test_what_is_kept_stays_through_a_commit_an_undo_and_a_later_round(how: How) -> None:
    full = {"a": torch.randn(4, 3), "draft": torch.randn(3, 5)}
    fused = torch.zeros(7, 3)  # a, and in the same memory a kept vector
    vector = Piece(tensor=spec("vector", 3), region=whole((3,)), at=(4, 0), axes=(1,))
    draft = torch.full((5, 3), 2.0).t()
    target = TensorTarget(
        {"a": (fused, [Piece(tensor=spec("a", 4, 3), region=whole((4, 3))), vector]), "draft": draft},
        **how,
    )
    fused[4:] = 9.0
    publish(target, full | {"vector": torch.full((3,), 8.0)})
    target.swap()  # a whole round first: what is live now is not what the shadow began with
    for new in (torch.randn(4, 3), torch.randn(4, 3)):
        before = fused[:4].clone()
        target.shadow()
        target.keep(["draft", "vector"])
        publish(target, {"a": new}, target.layout.without(["draft", "vector"]))
        for expected in (new, before, new):
            target.swap()
            assert torch.equal(fused[:4], expected)
            assert torch.equal(draft, full["draft"])
            assert fused[4].eq(8.0).all()


def test_keeping_needs_a_shadow() -> None:
    with pytest.raises(WrongState, match="without a shadow"):
        TensorTarget({"w": torch.zeros(1)}).keep(["w"])


# Pieces.


def spec(name: str, *shape: int, dtype: DType = DType.FLOAT32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


@every_way
def test_fused_transposed_stacked_and_padded_parameters_take_their_regions(how: How) -> None:
    full = {
        "q": torch.randn(8, 6),
        "k": torch.randn(4, 6),
        "down": torch.randn(6, 10),
        "e0": torch.randn(3, 5),
        "e1": torch.randn(3, 5),
        "vocab": torch.randn(11, 4),
    }
    s = {name: spec(name, *tensor.shape) for name, tensor in full.items()}
    qkv, down = torch.zeros(7, 6), torch.zeros(6, 5).t()  # the second: transposed storage
    experts, vocab = torch.zeros(2, 5, 3), torch.full((8, 4), 7.0)
    target = TensorTarget(
        {
            "qkv": (
                qkv,
                [
                    Piece(tensor=s["q"], region=box((2, 6), (0, 6))),
                    Piece(tensor=s["k"], region=box((1, 4), (0, 6)), at=(4, 0)),
                ],
            ),
            "down": (down, [Piece(tensor=s["down"], region=box((0, 6), (5, 10)), axes=(1, 0))]),
            "experts": (
                experts,
                [Piece(tensor=s[f"e{i}"], region=whole((3, 5)), at=(i, 0, 0), axes=(2, 1)) for i in (0, 1)],
            ),
            "vocab": (vocab, [Piece(tensor=s["vocab"], region=box((6, 11), (0, 4)))]),
        },
        **how,
    )
    publish(target, full)
    target.swap()
    assert torch.equal(qkv, torch.cat([full["q"][2:6], full["k"][1:4]]))
    assert torch.equal(down, full["down"][:, 5:].t())
    assert torch.equal(experts, torch.stack([full["e0"].t(), full["e1"].t()]))
    assert torch.equal(vocab, torch.cat([full["vocab"][6:], torch.full((3, 4), 7.0)]))  # padding is kept
    target.swap()
    assert not qkv.any() and not down.any() and not experts.any() and vocab.eq(7).all()


@pytest.mark.parametrize("dtype", [dtype.value for dtype in DType])
def test_padding_of_every_dtype_is_kept(dtype: str) -> None:
    parameter = random_tensor(dtype, (4, 4)).t()
    padding = content(parameter[2:])
    piece = Piece(tensor=spec("w", 2, 4, dtype=DType(dtype)), region=whole((2, 4)))
    target = TensorTarget({"w": (parameter, [piece])})
    target.shadow()
    target.swap()
    assert content(parameter[2:]) == padding


REFUSED: dict[str, tuple[str, Callable[[], Mapping[str, Any]]]] = {
    "expanded": ("w: .*overlaps itself or has gaps", lambda: {"w": torch.zeros(1, 3).expand(4, 3)}),
    "overlapping": ("w: .*overlaps itself", lambda: {"w": torch.zeros(9).as_strided((3, 3), (2, 1))}),
    "with gaps": ("w: .*has gaps", lambda: {"w": torch.zeros(4, 4)[:, :2]}),
    "complex": ("w: torch.complex64", lambda: {"w": torch.zeros(2, dtype=torch.complex64)}),
    "on another device": ("w: .*meta", lambda: {"w": torch.zeros(2, device="meta")}),
    "sparse": ("w: .*sparse", lambda: {"w": torch.eye(2).to_sparse()}),
    "sharing a part": ("a and b share", lambda: (lambda t: {"a": t[:3], "b": t[2:]})(torch.zeros(5))),
    "sharing in another shape": (
        "a and b share",
        lambda: (lambda t: {"a": t, "b": t.t()})(torch.zeros(2, 3)),
    ),
    "a piece of another dtype": (
        "f: float32 in w, which is float16",
        lambda: {"w": (torch.zeros(2).half(), [Piece(tensor=spec("f", 2), region=whole((2,)))])},
    ),
    "a piece outside its parameter": (
        "f: does not fit",
        lambda: {"w": (torch.zeros(2, 3).t(), [Piece(tensor=spec("f", 3, 3), region=whole((3, 3)))])},
    ),
    "a piece outside its tensor": (
        "f: region reaches",
        lambda: {"w": (torch.zeros(4), [Piece(tensor=spec("f", 3), region=whole((4,)))])},
    ),
    "a piece of other dimensions": (
        "f: index",
        lambda: {"w": (torch.zeros(4), [Piece(tensor=spec("f", 4), region=whole((4,)), at=(0, 0))])},
    ),
    "pieces on top of each other": (
        "w: a and b both at",
        lambda: {
            "w": (
                torch.zeros(4, 4),
                [
                    Piece(tensor=spec("a", 2, 4), region=whole((2, 4))),
                    Piece(tensor=spec("b", 2, 4), region=whole((2, 4)), at=(1, 0)),
                ],
            )
        },
    ),
    "two pieces in a scalar": (
        "w: a and b both at",
        lambda: {"w": (torch.zeros(()), [Piece(tensor=spec(name), region=()) for name in "ab"])},
    ),
    "pieces that disagree": (
        "f: pieces of it disagree",
        lambda: {
            "a": (torch.zeros(2), [Piece(tensor=spec("f", 4), region=box((0, 2)))]),
            "b": (torch.zeros(2), [Piece(tensor=spec("f", 5), region=box((2, 4)))]),
        },
    ),
    "one memory declared twice": (
        "a, b: one memory",
        lambda: (
            lambda t: {
                name: (t, [Piece(tensor=spec(f"full.{name}", 2), region=whole((2,)))]) for name in "ab"
            }
        )(torch.zeros(2)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_target_is_refused_by_name(case: str) -> None:
    message, parameters = REFUSED[case]
    with pytest.raises(LayoutInvalid, match=message):
        TensorTarget(parameters())


def test_pieces_of_an_unknown_parameter_are_refused() -> None:
    with pytest.raises(LayoutInvalid, match="does not have: wight"):
        module_target(torch.nn.Linear(2, 2), {"wight": ()})


def test_an_unknown_exchange_or_place_is_refused() -> None:
    with pytest.raises(ValueError, match="'disk' is none of device, host"):
        TensorTarget({"w": torch.zeros(1)}, shadow="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'move' is none of swap, copy"):
        TensorTarget({"w": torch.zeros(1)}, exchange="move")  # type: ignore[arg-type]


# Failures.


class Stubborn(torch.Tensor):
    """A tensor that cannot be pointed elsewhere so many times, from the `first` time on."""

    first: int
    times: int = 1
    seen: int = 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__set__" and isinstance(args[0], Stubborn):
            tensor = args[0]
            tensor.seen += 1
            if tensor.first <= tensor.seen < tensor.first + tensor.times:
                raise RuntimeError("cannot be pointed elsewhere")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def stubborn(first: int, times: int = 1) -> Stubborn:
    tensor = torch.arange(6.0).as_subclass(Stubborn)
    tensor.first, tensor.times = first, times
    return tensor


@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_swap_that_fails_in_the_middle_points_everything_back(position: int) -> None:
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(6)}
    items = list(tensors.items())
    items.insert(position, ("stubborn", stubborn(first=1)))
    target = TensorTarget(dict(items))
    staged, live = fill(target.shadow()), stored(target.live())
    addresses = [tensor.data_ptr() for _, tensor in items]
    with pytest.raises(RuntimeError, match="cannot be pointed"):
        target.swap()
    assert [tensor.data_ptr() for _, tensor in items] == addresses
    assert stored(target.live()) == live
    assert stored(target.shadow()) == staged
    target.swap()  # only the first time failed
    assert stored(target.live()) == staged == [content(tensor) for _, tensor in items]


def test_a_swap_that_can_neither_go_on_nor_back_is_torn() -> None:
    target = TensorTarget({"a": stubborn(first=2), "b": stubborn(first=1)})
    target.shadow()
    with pytest.raises(Torn, match="way back"):
        target.swap()


@dataclass(slots=True)
class FailingCopies:
    """Kernels whose copies fail from call `first` on, so many times: after half of the rows, as a bad page would."""

    first: int
    times: int = 1
    calls: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    inner: Kernels = field(default_factory=choose_kernels)

    def bind_copy(self, rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> BoundCopy:
        return FailingCopy(self, rows, self.inner.bind_copy(rows, sources, targets))

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> BoundDigest:
        return self.inner.bind_digest(rows, memories, slots)

    def bind_freeze(self, rows: Table, sources: Memories, targets: Memories, slots: int) -> BoundFreeze:
        return self.inner.bind_freeze(rows, sources, targets, slots)


@dataclass(slots=True)
class FailingCopy:
    """A bound copy of such kernels."""

    kernels: FailingCopies
    rows: Table
    inner: BoundCopy

    def run(self, first: int, last: int) -> None:
        with self.kernels.lock:
            self.kernels.calls = call = self.kernels.calls + 1
        if self.kernels.first <= call < self.kernels.first + self.kernels.times:
            self.inner.run(first, (first + last + 1) // 2)
            raise OSError(f"copy {call} failed")
        self.inner.run(first, last)


by_copy = pytest.mark.parametrize("how", [HOWS["copy"], HOWS["host"]], ids=["copy", "host"])


def chunky(kernels: Kernels, threads: int, how: How) -> TensorTarget:
    sizes = [3 * CHUNK_BYTES, 100, 100, CHUNK_BYTES + 5]
    tensors = {f"w{i}": random_tensor("uint8", (size,), i) for i, size in enumerate(sizes)}
    return TensorTarget(tensors, threads=threads, kernels=kernels, **how)


@by_copy
@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_that_fails_at_any_call_gives_every_byte_back(threads: int, how: How) -> None:
    count = FailingCopies(first=0, times=0)
    target = chunky(count, threads, how)
    live, staged = stored(target.live()), fill(target.shadow())
    target.swap()
    assert count.calls >= 12
    for failing in range(1, count.calls + 1):
        target = chunky(FailingCopies(first=failing), threads, how)
        fill(target.shadow())
        with pytest.raises(OSError, match=f"copy {failing} failed"):
            target.swap()
        assert stored(target.live()) == live
        assert stored(target.shadow()) == staged
        target.swap()
        assert stored(target.live()) == staged


@by_copy
def test_a_copy_that_can_neither_go_on_nor_back_is_torn(how: How) -> None:
    target = chunky(FailingCopies(first=5, times=100), threads=1, how=how)
    target.shadow()
    with pytest.raises(Torn, match="way back"):
        target.swap()


@every_way
def test_a_swap_without_a_shadow_is_refused(how: How) -> None:
    with pytest.raises(WrongState, match="without a shadow"):
        TensorTarget({"w": torch.zeros(1)}, **how).swap()


@every_way
def test_a_tensor_that_somebody_moved_is_named(how: How) -> None:
    module = torch.nn.Linear(2, 2)
    target = module_target(module, **how)
    target.shadow()
    module.bias.data = torch.zeros(2)
    with pytest.raises(LayoutInvalid, match=r"new target: bias$"):
        target.shadow()


@every_way
def test_a_shadow_that_does_not_fit_into_memory_changes_nothing(how: How) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 does not name
    huge = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 1 << 42, flags=flags), dtype=np.uint8))
    address = huge.data_ptr()
    target = TensorTarget({"huge": huge}, **how)
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            target.shadow()
    assert huge.data_ptr() == address
    with pytest.raises(WrongState, match="without a shadow"):
        target.swap()


# The shadow's memory.


@every_way
def test_the_shadow_is_aligned_and_kept_across_rounds(how: How) -> None:
    target = TensorTarget({f"w{i}": torch.zeros(i) for i in range(5)}, **how)
    shadow, live = target.shadow(), target.live()
    assert all(memory.address % 64 == 0 for memory in shadow if memory.size_bytes)
    target.swap()
    assert {id(target.shadow()), id(target.live())} == {id(shadow), id(live)}
    target.swap()
    assert target.shadow() is shadow and target.live() is live


def owned(fill_with: float) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and how to see that its memory is gone."""
    array = np.full(1000, fill_with, dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


@pytest.mark.parametrize("swaps", [0, 1, 2, 3])
def test_a_released_shadow_is_the_memory_that_is_not_live(swaps: int) -> None:
    tensor, original = owned(1)
    target = TensorTarget({"w": tensor})
    publish(target, {"w": torch.full((1000,), 2.0)})
    for _ in range(swaps):
        target.swap()
    value, shadow = float(tensor[0]), weakref.ref(target.shadow()[0].owner)
    target.release_shadow()
    assert shadow() is None
    assert (original() is None) is (swaps % 2 == 1)
    assert tensor.eq(value).all()
    publish(target, {"w": torch.full((1000,), 3.0)})  # and the next round has a shadow again
    target.swap()
    assert tensor.eq(3).all()
    target.swap()
    assert tensor.eq(value).all()


def test_weights_outlive_their_target() -> None:
    tensor, original = owned(1)
    target = TensorTarget({"w": tensor})
    publish(target, {"w": torch.full((1000,), 2.0)})
    target.swap()
    del target
    assert original() is None
    assert tensor.eq(2).all()
    assert tensor.untyped_storage().nbytes() == 4000  # and saving one does not save all


def test_a_released_copy_shadow_leaves_the_weights_where_they_are() -> None:
    tensor, original = owned(1)
    address = tensor.data_ptr()
    target = TensorTarget({"w": tensor}, exchange="copy")
    publish(target, {"w": torch.full((1000,), 2.0)})
    target.swap()
    shadow = weakref.ref(target.shadow()[0].owner)
    target.release_shadow()
    assert shadow() is None and original() is not None
    assert tensor.eq(2).all() and tensor.data_ptr() == address


@every_way
def test_forty_thousand_small_tensors_are_swapped(how: How) -> None:
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(40_000)}
    target = TensorTarget(tensors, **how)
    target.shadow()
    target.swap()
    assert not any(float(tensor[3]) for tensor in tensors.values())
    target.swap()
    assert all(float(tensor[3]) == i for i, tensor in enumerate(tensors.values()))
