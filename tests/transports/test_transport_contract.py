"""What every transfer mode keeps to, whatever carries its bytes: both halves in one process, every offer and device it has.

CUDA's driver is a double here. A real one refuses to open a handle in the process that made it: test_cuda has that, where a GPU is.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import choose_kernels
from liveweight.devices.memory import Memory
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LayoutInvalid,
    OfferChanged,
    OutOfMemory,
    Refused,
    VersionNotOffered,
    WrongSecret,
)
from liveweight.observe.events import OfferKind
from liveweight.plan.copies import row_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, Piece, Placement, packed, place
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import box, whole
from liveweight.transports.port import Arena, Reader, TransportSource
from liveweight.transports.registry import TRANSPORTS, Mode, mode
from liveweight.wire.messages.values import Offer
from tests.support.fake_cuda import fake_cuda
from tests.support.layouts import Bytes, Full, filled, fulls, placed, regions, tilings, view
from tests.support.wire import OTHER_SECRET, SECRET, leaving_nothing, soon

KINDS = [(name, kind) for name, entry in sorted(TRANSPORTS.items()) for kind in entry.offers]
DEVICES = ("cpu", "cuda:0")
MODES = sorted(TRANSPORTS)
CELLS = [(*k, d) for k in KINDS for d in DEVICES if d.partition(":")[0] in TRANSPORTS[k[0]].devices_of(k[1])]
MAPPED = {
    ("ipc", "frozen"): 2,
    ("ipc", "live"): 2,
    ("ipc", "ring"): 2,
    ("gdr", "frozen"): 1,
    ("gdr", "live"): 1,
    ("rdma", "frozen"): 1,
    ("rdma", "live"): 1,
}
"""How often an offer's memory is mapped here: by the source, and by the rank. Modes that are not listed share no memory. Of a ring
offer that is the page of its generation; the ring itself, RING, is mapped once for all offers."""
RING = 2
KERNELS = choose_kernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A transport source and a reader of one mode, and the kind of offer that is tried."""

    transport_source: TransportSource
    reader: Reader
    kind: OfferKind

    def offer(self, layout: Layout, contents: Sequence[Bytes], stack: ExitStack) -> tuple[Offer, list[Arena]]:
        """Arenas with these contents, offered; the stack closes them."""
        arenas = [self.transport_source.allocate(size, self.kind) for size in layout.memories_bytes]
        for arena, content in zip(arenas, contents, strict=True):
            stack.callback(arena.close)
            arena.memory.tensor()[: len(content)] = torch.from_numpy(content)
        stack.callback(self.transport_source.withdraw, layout)
        return self.transport_source.offer(layout, arenas, self.kind), arenas

    def read(self, offer: Offer, target: Layout, shadow: Sequence[Bytes]) -> None:
        """All of an offer, as a rank's staging thread reads it."""
        reading = self.reader.bind(offer, target, memories(shadow), soon())
        reading.check()
        reading.read(0, len(reading.rows))
        reading.check()
        reading.end()


def memories(arrays: Sequence[Bytes]) -> list[Memory]:
    return [Memory.from_array(array) for array in arrays]


def device(name: str, directory: Path) -> Device:
    """The device as one process has it: each half has its own."""
    return CPU if name == "cpu" else fake_cuda(directory, name)


@contextmanager
def opened(entry: Mode, kind: OfferKind, name: str = "cpu") -> Iterator[Halves]:
    with tempfile.TemporaryDirectory(prefix="lw-") as place, ExitStack() as stack:
        directory = Path(place)
        transport_source = entry.transport_source(directory, SECRET, device(name, directory))
        stack.callback(transport_source.close)
        there = device(name, directory)
        reader = entry.reader(SECRET, there.choose().kernels, there)
        stack.callback(reader.close)
        yield Halves(transport_source=transport_source, reader=reader, kind=kind)


@pytest.fixture(params=CELLS, ids="-".join, scope="module")
def halves(request: pytest.FixtureRequest) -> Iterator[Halves]:
    mode_name, kind, device_name = request.param
    with opened(TRANSPORTS[mode_name], kind, device_name) as both:
        yield both


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Full], Layout, Layout]:
    """Tensors, a source that tiles them in any storage, a target that owns some boxes of them in another."""
    tensors = {name: draw(fulls(name=name, max_side=6)) for name in "abc"[: draw(st.integers(1, 3))]}
    tiles = [(t.spec, tile) for t in tensors.values() for tile in draw(tilings(t.spec.shape))]
    owned = [
        (t.spec, draw(regions(t.spec.shape)))
        for t in tensors.values()
        for _ in range(draw(st.integers(0, 2)))
    ]
    return tensors, draw(placed(draw(st.permutations(tiles)))), draw(placed(owned))


def expected(target: Layout, tensors: dict[str, Full], shadow: Sequence[Bytes]) -> list[Bytes]:
    """What a shadow should hold afterwards: the regions, and what lay around them."""
    after = [array.copy() for array in shadow]
    for placement in target.placements:
        full = tensors[placement.name]
        part = full.part(placement.region)
        if part.size:
            view(after[placement.memory], placement, full.spec.dtype.size_bytes)[...] = part
    return after


def blank(target: Layout, seed: int = 0) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in target.memories_bytes]


@given(scene=scenes())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
def test_any_layout_arrives_bit_for_bit_and_nothing_around_it_changes(
    halves: Halves, scene: tuple[dict[str, Full], Layout, Layout]
) -> None:
    tensors, source, target = scene
    shadow = blank(target)
    wanted = expected(target, tensors, shadow)
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        halves.read(offer, target, shadow)
    assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))


def decoder(rows: int = 96) -> tuple[dict[str, Full], Layout, Layout]:
    """A source with whole tensors; a target with a fused, a column-sliced, a transposed and a strided one."""
    rng = np.random.default_rng(3)
    tensors = {
        name: Full(
            spec=TensorSpec(name=name, dtype=DType.BFLOAT16, shape=(rows, 64)),
            raw=rng.integers(0, 256, (rows, 64, 2), dtype=np.uint8),
        )
        for name in ("q", "k", "down", "tied", "every")
    }
    q, k, down, tied, every = (full.spec for full in tensors.values())
    fused = place(
        [
            Piece(tensor=q, region=box((0, rows // 2), (0, 64))),
            Piece(tensor=k, region=box((0, rows // 2), (0, 64)), at=(rows // 2, 0)),
        ],
        memory=0,
        shape=(rows, 64),
    )
    sliced = place([Piece(tensor=down, region=box((0, rows), (16, 32)))], memory=1, shape=(rows, 16))
    turned = place([Piece(tensor=tied, region=whole(tied.shape), axes=(1, 0))], memory=2, shape=(64, rows))
    strided = Placement(
        name="every",
        region=box(slice(1, rows, 3), (0, 64)),
        memory=3,
        offset_bytes=6,
        strides_bytes=(200, 2),
    )
    sizes = (rows * 128, rows * 32, rows * 128, rows * 200)
    target = Layout(
        tensors=(q, k, down, tied, every),
        memories_bytes=sizes,
        placements=(*fused, *sliced, *turned, strided),
    )
    return tensors, packed([full.spec for full in tensors.values()]), target


def test_fused_sliced_transposed_and_strided_targets_are_filled(halves: Halves) -> None:
    tensors, source, target = decoder()
    shadow = blank(target)
    wanted = expected(target, tensors, shadow)
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        halves.read(offer, target, shadow)
    assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))


def test_several_threads_read_disjoint_rows_at_once(halves: Halves) -> None:
    tensors, source, target = decoder(rows=60_000)
    shadow = blank(target)
    wanted = expected(target, tensors, shadow)
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        reading = halves.reader.bind(offer, target, memories(shadow), soon())
        assert row_bytes(reading.rows).max() <= 4 << 20
        assert len(reading.rows) > 5
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda row: reading.read(row, row + 1), range(len(reading.rows))))
        reading.check()
    assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))


def test_an_offer_names_its_mode_kind_source_and_layout(halves: Halves) -> None:
    tensors, source, _ = decoder()
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        assert (offer.kind, offer.source) == (halves.kind, halves.transport_source.address)
        assert offer.layout == source.fingerprint
        assert TRANSPORTS[offer.mode].offers


@pytest.mark.parametrize("moment", ["before binding", "before reading", "while reading", "after reading"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_raised_generation_is_noticed_whenever_and_wherever_it_happens(
    halves: Halves, moment: str, which: int
) -> None:
    tensors = {name: Full(spec=spec(name), raw=np.ones((8, 4, 2), dtype=np.uint8)) for name in "ab"}
    source = two_memories(tensors)
    target = packed([full.spec for full in tensors.values()])
    shadow = blank(target)
    with ExitStack() as stack:
        offer, arenas = halves.offer(source, filled(source, tensors), stack)

        def at(now: str) -> None:
            if now == moment:
                arenas[which].raise_generation()

        at("before binding")
        reading = halves.reader.bind(offer, target, memories(shadow), soon())
        at("before reading")
        with pytest.raises(
            OfferChanged, match="generation"
        ):  # at the check; of a ring, as soon as nothing comes
            reading.read(0, 1)
            at("while reading")
            reading.read(1, len(reading.rows))
            at("after reading")
            reading.check()
        reading.end()
        again = halves.transport_source.offer(source, arenas, halves.kind)
        assert again.generation != offer.generation
        halves.read(again, target, shadow)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.FLOAT16, shape=(8, 4))


def two_memories(tensors: dict[str, Full]) -> Layout:
    """One memory per tensor."""
    specs = [full.spec for full in tensors.values()]
    placements = [
        placement
        for number, s in enumerate(specs)
        for placement in place([Piece(tensor=s, region=whole(s.shape))], memory=number, shape=s.shape)
    ]
    return Layout(
        tensors=tuple(specs),
        memories_bytes=tuple(s.size_bytes for s in specs),
        placements=tuple(placements),
    )


def test_rounds_after_the_first_show_new_bytes_to_either_shadow_without_attaching_again(
    halves: Halves,
) -> None:
    tensors, source, target = decoder()
    shadows = [blank(target, seed) for seed in (1, 2)]
    with ExitStack() as stack:
        offer, arenas = halves.offer(source, filled(source, tensors), stack)
        halves.read(offer, target, shadows[0])
        attached = requests(halves.reader)
        for round_number in range(6):
            arenas[0].raise_generation()
            memory = arenas[0].memory.bytes()
            memory[:] = np.random.default_rng(round_number).integers(0, 256, len(memory), dtype=np.uint8)
            now = {
                p.name: Full(spec=tensors[p.name].spec, raw=view(memory, p, 2).copy())
                for p in source.placements
            }
            shadow = shadows[round_number % 2]
            wanted = expected(target, now, shadow)
            halves.read(halves.transport_source.offer(source, arenas, halves.kind), target, shadow)
            assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))
        assert requests(halves.reader) == attached


def requests(reader: Reader) -> int:
    """How often the reader asked a source where its memory lies."""
    return int(reader.requests)  # type: ignore[attr-defined]


def test_two_targets_read_the_same_offer(halves: Halves) -> None:
    tensors, source, target = decoder()
    other = packed([full.spec for full in tensors.values()])
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        for layout in (target, other, target):
            shadow = blank(layout)
            wanted = expected(layout, tensors, shadow)
            halves.read(offer, layout, shadow)
            assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))


def test_a_shadow_is_not_held_by_what_a_reader_keeps(halves: Halves) -> None:
    tensors, source, target = decoder()
    shadow = blank(target)
    alive = weakref.ref(shadow[0])
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        halves.read(offer, target, shadow)
        del shadow
        assert alive() is None


def test_other_arenas_under_the_same_layout_replace_those_of_before(halves: Halves) -> None:
    tensors, source, target = decoder()
    shadow = blank(target)
    with ExitStack() as stack:
        first, _ = halves.offer(source, [np.zeros(source.memories_bytes[0], dtype=np.uint8)], stack)
        halves.read(first, target, shadow)
        second, _ = halves.offer(source, filled(source, tensors), stack)
        wanted = expected(target, tensors, shadow)
        halves.read(second, target, shadow)
        assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))
        stale = halves.reader.bind(first, target, memories(shadow), soon())
        with pytest.raises(OfferChanged):
            stale.check()


def test_a_forgotten_source_is_attached_to_again(halves: Halves) -> None:
    tensors, source, target = decoder()
    shadow = blank(target)
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        halves.read(offer, target, shadow)
        before = requests(halves.reader)
        halves.reader.forget(offer.source)
        halves.reader.forget("nobody")
        halves.read(offer, target, shadow)
        assert requests(halves.reader) == before + 1


def test_a_reading_outlives_its_arena_and_what_the_reader_kept_but_is_revoked(halves: Halves) -> None:
    tensors, source, target = decoder()
    shadow = blank(target)
    wanted = expected(target, tensors, shadow)
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        reading = halves.reader.bind(offer, target, memories(shadow), soon())
        halves.reader.forget(offer.source)
        reading.check()
    if halves.kind == "ring":  # nobody packs any more
        with pytest.raises((OfferChanged, ChannelClosed)):
            reading.read(0, len(reading.rows))
        return
    reading.read(0, len(reading.rows))
    if (
        TRANSPORTS[offer.mode].reach != "any host"
    ):  # there the memory is the source's alone, and reads as zeros now
        assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))
    with pytest.raises(OfferChanged):
        reading.check()
    reading.end()


def test_memory_that_the_source_has_let_go_of_is_dropped_at_the_next_round(halves: Halves) -> None:
    tensors, source, target = decoder()
    others, other_source, other_target = decoder(rows=48)
    with ExitStack() as stack:
        offer, _ = halves.offer(other_source, filled(other_source, others), stack)
        halves.read(offer, other_target, blank(other_target))
        before = mappings()
        with ExitStack() as inner:
            first, _ = halves.offer(source, filled(source, tensors), inner)
            halves.read(first, target, blank(target))
            assert mappings() == before + MAPPED.get((first.mode, halves.kind), 0)
        halves.read(offer, other_target, blank(other_target))
        assert mappings() == before


def test_a_withdrawn_layout_is_not_handed_out(halves: Halves) -> None:
    tensors, source, target = decoder()
    with ExitStack() as stack:
        offer, _ = halves.offer(source, filled(source, tensors), stack)
        halves.transport_source.withdraw(source)
        halves.reader.forget(offer.source)
        with pytest.raises(VersionNotOffered, match=source.fingerprint):
            halves.reader.bind(offer, target, memories(blank(target)), soon())


def test_arenas_that_do_not_fit_the_layout_are_refused(halves: Halves) -> None:
    _, source, _ = decoder()
    arena = halves.transport_source.allocate(source.memories_bytes[0] + 1, halves.kind)
    with pytest.raises(LayoutInvalid):
        halves.transport_source.offer(source, [arena], halves.kind)
    with pytest.raises(LayoutInvalid):
        halves.transport_source.offer(source, [], halves.kind)
    arena.close()


def test_a_source_that_lacks_a_tensor_is_refused_by_name(halves: Halves) -> None:
    tensors, _, target = decoder()
    without = packed([full.spec for full in tensors.values() if full.spec.name != "down"])
    with ExitStack() as stack:
        offer, _ = halves.offer(without, filled(without, tensors), stack)
        with pytest.raises(Refused, match="down"):
            halves.reader.bind(offer, target, memories(blank(target)), soon())


def test_an_arena_that_cannot_be_had_is_refused_with_its_size(halves: Halves) -> None:
    with leaving_nothing(), pytest.raises(OutOfMemory, match=str(1 << 50)):
        halves.transport_source.allocate(1 << 50, halves.kind)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_restarted_source_is_attached_to_anew_and_the_old_one_let_go(name: str, kind: OfferKind) -> None:
    tensors, source, target = decoder()
    shadow, before = blank(target), mappings()
    with leaving_nothing(), tempfile.TemporaryDirectory(prefix="lw-") as directory, ExitStack() as stack:
        reader = TRANSPORTS[name].reader(SECRET, KERNELS)
        stack.callback(reader.close)
        for _ in range(3):
            with ExitStack() as life:
                transport_source = TRANSPORTS[name].transport_source(Path(directory), SECRET)
                life.callback(transport_source.close)
                both = Halves(transport_source=transport_source, reader=reader, kind=kind)
                offer, _ = both.offer(source, filled(source, tensors), life)
                wanted = expected(target, tensors, shadow)
                both.read(offer, target, shadow)
                assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))
                ring = RING if kind == "ring" else 0
                assert mappings() == before + MAPPED.get((name, kind), 0) + ring
        assert requests(reader) == 3


def mappings() -> int:
    """How many arenas this process maps."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:liveweight")


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_source_that_is_gone_ends_the_wait_at_once(name: str, kind: OfferKind) -> None:
    tensors, source, target = decoder()
    with opened(TRANSPORTS[name], kind) as both, ExitStack() as stack:
        offer, _ = both.offer(source, filled(source, tensors), stack)
        both.transport_source.withdraw(source)
        both.transport_source.close()
        with pytest.raises(ChannelClosed, match="gone"):
            both.reader.bind(offer, target, memories(blank(target)), soon())


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_rank_with_another_secret_is_told_so(name: str, kind: OfferKind) -> None:
    tensors, source, target = decoder()
    with opened(TRANSPORTS[name], kind) as both, ExitStack() as stack:
        offer, _ = both.offer(source, filled(source, tensors), stack)
        stranger = TRANSPORTS[name].reader(OTHER_SECRET, KERNELS)
        stack.callback(stranger.close)
        with pytest.raises(WrongSecret):
            stranger.bind(offer, target, memories(blank(target)), soon())
        both.read(offer, target, blank(target))


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_deadline_that_is_over_ends_the_wait(name: str, kind: OfferKind) -> None:
    tensors, source, target = decoder()
    with opened(TRANSPORTS[name], kind) as both, ExitStack() as stack:
        offer, _ = both.offer(source, filled(source, tensors), stack)
        with pytest.raises(DeadlineExceeded):
            both.reader.bind(offer, target, memories(blank(target)), Deadline.after(0.0))


@pytest.mark.parametrize("name", MODES)
def test_an_offer_that_the_mode_does_not_have_is_refused(name: str) -> None:
    _, source, _ = decoder()
    kinds: tuple[OfferKind, ...] = ("live", "frozen", "ring")
    with opened(TRANSPORTS[name], TRANSPORTS[name].offers[0]) as both:
        arena = both.transport_source.allocate(source.memories_bytes[0])
        for kind in set(kinds) - set(TRANSPORTS[name].offers):
            with pytest.raises(Refused, match=kind):
                both.transport_source.offer(source, [arena], kind)
        arena.close()


@pytest.mark.parametrize(("name", "kind", "where"), CELLS)
def test_nothing_is_left_after_close(name: str, kind: OfferKind, where: str) -> None:
    tensors, source, target = decoder()
    threads, maps = threading.active_count(), mappings()
    with leaving_nothing():
        with opened(TRANSPORTS[name], kind, where) as both, ExitStack() as stack:
            offer, _ = both.offer(source, filled(source, tensors), stack)
            both.read(offer, target, blank(target))
            both.transport_source.close()
            both.transport_source.close()
            both.reader.close()
        assert mappings() == maps
    assert threading.active_count() == threads


def test_the_table_names_each_mode_once_and_completely() -> None:
    for name, entry in TRANSPORTS.items():
        assert (entry.name, mode(name)) == (name, entry)
        assert entry.offers
        assert entry.summary


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refused, match=r"'carrier pigeon', known: .*ipc"):
        mode("carrier pigeon")
