"""A publisher without a model: every version comes as an iterator, in any order, and is run to its end whatever happens."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import liveweight as lw
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import (
    LabelInvalid,
    LiveWeightError,
    ManifestInvalid,
    ManifestMismatch,
    Refused,
    RoundFailed,
    Unavailable,
    VersionConflict,
    WrongState,
)
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.events import LiveOfferImpossible
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.trainer.offers.freeze import SMALL_BYTES, Freezer
from liveweight.trainer.sources.one_shot_source import OneShotSource
from tests.support.stepping import engine, publisher, serving

BIG = (512, 513)
"""The shape of a tensor that a kernel freezes, in any float dtype."""


class Pass:
    """An iterator that counts what it gave, and knows whether it was run to its end."""

    def __init__(self, tensors: Mapping[str, Tensor] | Iterable[tuple[Any, Any]]) -> None:
        self._items = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
        self.ended = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._items)
        except StopIteration:
            self.ended = True
            raise


def weights(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((4, 3), float(value)), "b": torch.full((3,), float(value))}


def model() -> dict[str, Tensor]:
    """Small and large tensors, for an engine that has bfloat16."""
    return {
        "small": torch.zeros(3, dtype=torch.bfloat16),
        "large": torch.zeros(BIG, dtype=torch.bfloat16),
        "count": torch.zeros(2, dtype=torch.int64),
    }


def assert_serves(live: Mapping[str, Tensor], value: float) -> None:
    for name, tensor in live.items():
        assert torch.equal(tensor, torch.full_like(tensor, value)), name


# What comes.


def test_versions_come_as_iterators_in_any_order_and_dtype(short_path: Path) -> None:
    assert torch.zeros(BIG, dtype=torch.bfloat16).nbytes > SMALL_BYTES
    live = model()
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        for label, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16, torch.float64), 1):
            torch.manual_seed(label)
            values = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in live.items()}
            values["count"] = torch.tensor([label, -label])
            names = sorted(values, reverse=bool(label % 2))
            given = Pass((name, values[name]) for name in names)
            report = sender.publish(label, tensors=given)
            assert (report.offer, report.verified, report.unchanged) == ("frozen", True, False)
            for name, tensor in live.items():
                assert torch.equal(tensor, values[name].to(tensor.dtype)), name
            assert sender.verify().match


def test_a_strided_tensor_and_reused_memory_are_frozen_as_they_come(short_path: Path) -> None:
    live = {name: torch.zeros(BIG) for name in ("a", "b", "c")}
    buffer = torch.empty(BIG[::-1]).t()

    def reusing(first: float) -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(("c", "a", "b")):
            yield name, buffer.fill_(first + number)

    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        for first in (1.0, 10.0):
            sender.offer(int(first), tensors=reusing(first))
            buffer.fill_(-1.0)
            sender.wait()
            assert [float(live[name][-1, -1]) for name in "cab"] == [first, first + 1, first + 2]
            assert sender.verify().match


def test_no_tensor_is_held_while_the_next_is_made() -> None:
    manifest = Manifest(
        tensors=tuple(TensorSpec(name=name, dtype=DType.FLOAT32, shape=BIG) for name in ("a", "b", "c"))
    )
    source, held = OneShotSource(), []
    source.require(manifest)
    alive: list[weakref.ref[Tensor]] = []

    def giving() -> Iterator[tuple[str, Tensor]]:
        for name in ("b", "c", "a"):
            gc.collect()
            held.append(sum(one() is not None for one in alive))
            tensor = torch.ones(BIG)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    freezer = Freezer(manifest, manifest, choose_kernels())
    arena = Memory.from_tensor(torch.zeros(freezer.layout.memories_bytes[0], dtype=torch.uint8))
    for _ in range(2):
        source.hand_over(giving())
        freezer.freeze(source, arena, threads=1, digest=True)
    assert held == [0] * 6


@pytest.mark.parametrize(
    "prefix", ["module.", "module.module.", "_orig_mod.", "base_model.model.", "module._orig_mod."]
)
def test_names_lose_their_wrappers(short_path: Path, prefix: str) -> None:
    live = engine()
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        sender.publish(1, tensors={f"{prefix}{name}": t for name, t in weights(5.0).items()}.items())
    assert_serves(live, 5.0)


def test_stacked_experts_are_split_for_an_engine_that_expects_them_one_by_one(short_path: Path) -> None:
    live = {
        f"experts.{expert}.{kind}.weight": torch.zeros(2, 3)
        for expert in range(2)
        for kind in ("gate_proj", "up_proj")
    }
    stacked = torch.arange(24.0).reshape(2, 4, 3)
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        sender.publish(1, tensors=iter([("module.experts.gate_up_proj", stacked)]))
    assert torch.equal(live["experts.1.gate_proj.weight"], stacked[1, :2])
    assert torch.equal(live["experts.1.up_proj.weight"], stacked[1, 2:])
    assert torch.equal(live["experts.0.up_proj.weight"], stacked[0, 2:])


# Tied tensors.


@pytest.mark.parametrize("shape", [(4, 3), BIG])
@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head"), ("head", "embed")])
def test_a_tied_tensor_comes_under_one_of_its_names_or_several(
    short_path: Path, shape: tuple[int, int], names: tuple[str, ...]
) -> None:
    shared = torch.zeros(shape)
    with (
        serving({"embed": shared, "head": shared}, short_path) as address,
        publisher(None, address, short_path) as sender,
    ):
        sender.publish(1, tensors=[(name, torch.ones(shape)) for name in names])
        assert_serves({"embed": shared}, 1.0)


@pytest.mark.parametrize("shape", [(4, 3), BIG])
def test_tied_names_with_different_content_are_refused_by_name(
    short_path: Path, shape: tuple[int, int]
) -> None:
    shared = torch.zeros(shape)
    other = torch.ones(shape)
    other[-1, -1] = 2.0
    with (
        serving({"embed": shared, "head": shared}, short_path) as address,
        publisher(None, address, short_path) as sender,
    ):
        given = Pass([("embed", torch.ones(shape)), ("head", other)])
        with pytest.raises(ManifestMismatch, match="embed and head are one tensor"):
            sender.publish(1, tensors=given)
        assert given.ended
        assert_serves({"embed": shared}, 0.0)


# What is refused.

TOGETHER = weights(2.0)
REFUSED: dict[str, tuple[type[LiveWeightError], str, list[tuple[Any, Any]]]] = {
    "unexpected": (ManifestMismatch, "other unexpected", [("other", torch.ones(2)), *TOGETHER.items()]),
    "missing": (ManifestMismatch, "b missing", [("w", TOGETHER["w"])]),
    "nothing": (ManifestMismatch, "w missing, b missing", []),
    "twice": (ManifestInvalid, "gave w twice", [*TOGETHER.items(), ("w", TOGETHER["w"])]),
    "twice, wrapped": (
        ManifestInvalid,
        "w and module.w, which are both w",
        [*TOGETHER.items(), ("module.w", TOGETHER["w"])],
    ),
    "shape": (
        ManifestMismatch,
        r"w expected float32\[4, 3\], offered float32\[3, 4\]",
        [("w", torch.ones(3, 4)), *TOGETHER.items()],
    ),
    "dtype": (
        ManifestMismatch,
        r"w expected float32\[4, 3\], offered int32",
        [("w", torch.ones(4, 3, dtype=torch.int32)), *TOGETHER.items()],
    ),
    "meta": (
        ManifestInvalid,
        "w is on the meta device",
        [("w", torch.ones(4, 3, device="meta")), *TOGETHER.items()],
    ),
    "no tensor": (ManifestInvalid, "w is not a tensor but float", [("w", 1.0), *TOGETHER.items()]),
    "no pair": (ManifestInvalid, "a name and a tensor, not str", ["w", *TOGETHER.items()]),  # type: ignore[list-item]
    "adapter": (
        ManifestInvalid,
        "belongs to an adapter",
        [("w.lora_A.weight", torch.ones(2)), *TOGETHER.items()],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_the_next_version_is_published(
    short_path: Path, case: str
) -> None:
    error, text, items = REFUSED[case]
    live = engine()
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        sender.publish(1, tensors=weights(1.0).items())
        for _ in range(2):
            given = Pass(items)
            with pytest.raises(error, match=text):
                sender.publish(2, tensors=given)
            assert given.ended
            assert_serves(live, 1.0)
        assert sender.publish(2, tensors=weights(3.0).items()).version.label == 2
        assert_serves(live, 3.0)


def test_what_the_iterator_raises_is_said_with_the_tensor_before(short_path: Path) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "b", torch.ones(3)
        raise OSError("gone")

    live = engine()
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        with pytest.raises(Unavailable, match="failed after b: OSError: gone"):
            sender.publish(1, tensors=failing())
        sender.publish(1, tensors=weights(1.0).items())
        assert_serves(live, 1.0)


def test_an_interrupt_half_way_runs_the_iterator_to_its_end(short_path: Path) -> None:
    live = engine()
    ended = []

    class Interrupting(Tensor):
        @property
        def shape(self) -> Any:  # type: ignore[override]
            raise KeyboardInterrupt

    def giving() -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.ones(4, 3).as_subclass(Interrupting)
        yield "b", torch.ones(3)
        ended.append(True)

    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        with pytest.raises(KeyboardInterrupt):
            sender.publish(1, tensors=giving())
        assert ended == [True]
        sender.publish(1, tensors=weights(1.0).items())
        assert_serves(live, 1.0)


# Calls that are refused before a round begins still run the iterator: other ranks wait in it.


def closed(sender: lw.Publisher, given: Pass) -> None:
    sender.close()
    sender.publish(1, tensors=given)


def in_two_threads(sender: lw.Publisher, given: Pass) -> None:
    errors: list[BaseException] = []

    def second() -> None:
        try:
            sender.publish(2, tensors=given)
        except WrongState as error:
            errors.append(error)

    def first() -> Iterator[tuple[str, Tensor]]:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        yield from weights(1.0).items()

    sender.publish(1, tensors=first())
    raise errors[0]


UNREAD: dict[str, tuple[type[LiveWeightError], Callable[[lw.Publisher, Pass], object]]] = {
    "label": (LabelInvalid, lambda sender, given: sender.publish("", tensors=given)),
    "readers": (Refused, lambda sender, given: sender.offer(1, readers=2, tensors=given)),
    "closed": (WrongState, closed),
    "two threads": (WrongState, in_two_threads),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_iterator_that_is_not_read_is_run_to_its_end(short_path: Path, case: str) -> None:
    error, call = UNREAD[case]
    given = Pass(weights(1.0))
    with (
        serving(engine(), short_path) as address,
        publisher(None, address, short_path) as sender,
        pytest.raises(error),
    ):
        call(sender, given)
    assert given.ended


def test_after_a_round_that_failed_unnoticed_the_iterator_is_run_to_its_end(short_path: Path) -> None:
    live = engine()
    with serving(live, short_path) as address, publisher(None, address, short_path, run="r") as sender:
        sender.publish(1, tensors=weights(1.0).items())
        with publisher(None, address, short_path, run="r") as successor:
            successor.offer(
                1, tensors=weights(2.0).items()
            )  # this label stands for other content at the engine
            given = Pass(weights(3.0))
            with pytest.raises(RoundFailed):
                successor.offer(2, tensors=given)
            assert given.ended
            with pytest.raises(VersionConflict):
                sender.publish(1, tensors=weights(4.0).items())
            successor.publish(3, tensors=weights(3.0).items())
        assert_serves(live, 3.0)


def test_a_model_and_tensors_exclude_each_other(short_path: Path) -> None:
    live, given = engine(), Pass(weights(1.0))
    with serving(live, short_path) as address:
        with (
            publisher(weights(1.0), address, short_path) as sender,
            pytest.raises(Refused, match="for a publisher without a model"),
        ):
            sender.publish(1, tensors=given)
        assert given.ended
        with publisher(None, address, short_path) as sender:
            with pytest.raises(Refused, match="has no model: publish and offer need tensors="):
                sender.publish(1)
            with pytest.raises(Refused, match="not builtins"):
                sender.publish(1, tensors=3)  # type: ignore[arg-type]
            sender.publish(1, tensors=weights(1.0).items())
            with pytest.raises(Refused, match="has no model"):
                sender.offer(2)


# What other frozen offers can do.


@pytest.mark.parametrize("kind", ["live", "ring"])
def test_other_offers_are_frozen_and_the_reason_is_said_once(short_path: Path, kind: Any) -> None:
    live, bus, emitted = engine(), Bus(), Recorder()
    with (
        bus.subscribe(emitted),
        serving(live, short_path) as address,
        publisher(None, address, short_path, offer=kind, bus=bus) as sender,
    ):
        for label in (1, 2):
            assert sender.publish(label, tensors=weights(label).items()).offer == "frozen"
    assert [event.kind for event in emitted.of(LiveOfferImpossible)] == [kind]


def test_an_undo_goes_back_to_the_iterator_before(short_path: Path) -> None:
    live = engine()
    with serving(live, short_path) as address, publisher(None, address, short_path) as sender:
        for label in (1, 2):
            sender.publish(label, tensors=weights(label).items())
        assert sender.catch_up() is None
        sender.undo()
        assert_serves(live, 1.0)
        assert sender.catch_up() is not None
        assert_serves(live, 2.0)


@pytest.mark.parametrize("mode", ["ipc_snapshot", "rdma"])
def test_other_transfer_modes_carry_iterators(short_path: Path, mode: str) -> None:
    if mode == "rdma":
        pytest.importorskip("nixl")
    live = engine()
    with (
        serving(live, short_path) as address,
        publisher(None, address, short_path, transfer_mode=mode) as sender,
    ):
        for label in (1, 2):
            assert sender.publish(label, tensors=weights(label).items()).mode == mode
            assert_serves(live, label)


# Without engines.


def offering(directory: Path, **options: Any) -> lw.Publisher:
    return lw.Publisher(
        address=f"ipc://{directory}/source.sock",
        secret=directory / "secret",
        directory=directory / "trainer",
        timeout_s=20.0,
        **options,
    )


def streamed(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a stream reads of the version on offer, for a program that holds such tensors."""
    with lw.Receiver(
        dict(tensors),
        address=f"ipc://{directory}/engine.sock",
        secret=directory / "secret",
        weights_from=f"ipc://{directory}/source.sock",
    ) as receiver:
        return {name: tensor.clone() for name, tensor in receiver.stream()}


@pytest.mark.parametrize("mode", ["ipc", "ipc_snapshot"])
def test_without_engines_the_first_version_says_what_is_offered(short_path: Path, mode: str) -> None:
    values = {
        "a": torch.randn(BIG),
        "b": torch.randn(7).to(torch.bfloat16),
        "n": torch.arange(3),
        "e": torch.ones(0, 3),
    }
    with offering(short_path, transfer_mode=mode) as sender:
        for label in (1, 2):
            version = sender.offer(
                label, tensors=Pass((f"module.{name}", t * label) for name, t in values.items())
            )
            assert version.content_known
            found = streamed(short_path, values)
            assert {name: t.dtype for name, t in found.items()} == {
                name: t.dtype for name, t in values.items()
            }
            for name, tensor in values.items():
                assert torch.equal(found[name], tensor * label), name


def test_without_engines_floats_are_offered_in_the_dtype_that_was_asked_for(short_path: Path) -> None:
    values = {"a": torch.randn(BIG), "n": torch.arange(3)}
    with offering(short_path, dtype="bfloat16") as sender:
        for label in (1, 2):
            sender.offer(label, tensors=[(name, t * label) for name, t in values.items()])
            wanted = {"a": (values["a"] * label).to(torch.bfloat16), "n": values["n"] * label}
            found = streamed(short_path, wanted)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_engines_later_versions_must_have_the_tensors_of_the_first(short_path: Path) -> None:
    with offering(short_path) as sender:
        refused: dict[str, list[tuple[str, Tensor]]] = {
            "w twice": [*weights(1.0).items(), ("w", torch.ones(1))],
            "meta device": [("w", torch.ones(2, device="meta"))],
            "without tensors": [],
        }
        for text, items in refused.items():
            given = Pass(items)
            with pytest.raises(ManifestInvalid, match=text):
                sender.offer(1, tensors=given)
            assert given.ended
        sender.offer(1, tensors=weights(1.0).items())
        for text, items in {
            "b missing": [("w", torch.ones(4, 3))],
            "x unexpected": [("x", torch.ones(1))],
            "w expected": [("w", torch.ones(4, 4)), ("b", torch.ones(3))],
        }.items():
            given = Pass(items)
            with pytest.raises(ManifestMismatch, match=text):
                sender.offer(2, tensors=given)
            assert given.ended
        sender.offer(2, tensors=weights(2.0).items())
        assert_serves(streamed(short_path, engine()), 2.0)
        with pytest.raises(WrongState, match="no engines"):
            sender.publish(3, tensors=(given := Pass(weights(3.0))))
        assert given.ended


def test_without_engines_stacked_experts_are_offered_as_checkpoints_name_them(short_path: Path) -> None:
    stacked = torch.arange(24.0).reshape(2, 4, 3)
    parts = {
        f"experts.{e}.{kind}.weight": torch.zeros(2, 3) for e in range(2) for kind in ("gate_proj", "up_proj")
    }
    with offering(short_path) as sender:
        for label in (1, 2):
            sender.offer(label, tensors=iter([("experts.gate_up_proj", stacked * label)]))
            found = streamed(short_path, parts)
            assert torch.equal(found["experts.1.up_proj.weight"], stacked[1, 2:] * label)


def memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{field}:"))


def test_the_first_version_without_engines_takes_one_copy_and_the_largest_tensor(short_path: Path) -> None:
    count, shape = 24, (2048, 2048)  # of 16 MB each

    def giving() -> Iterator[tuple[str, Tensor]]:
        for number in range(count):
            yield f"w{number}", buffer.fill_(number)

    buffer = torch.empty(shape)
    with offering(short_path) as sender:
        gc.collect()
        before = memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        sender.offer(1, tensors=giving())
        extra = memory_bytes("VmHWM") - before
    largest = buffer.nbytes
    assert extra < (count + 1) * largest + (16 << 20), f"{extra / largest:.2f} tensors of {count}"
