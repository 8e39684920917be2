"""What every transfer mode that reads memory keeps to for an offer of the shards of several trainer ranks: every cell of the table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liveweight.errors import ChannelClosed, LayoutInvalid, OfferChanged, VersionNotOffered
from liveweight.spec.layout import Layout, packed_regions
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, box
from liveweight.transports.port import Arena, Reader, Reading, TransportSource
from liveweight.transports.registry import TRANSPORTS, Mode
from liveweight.transports.sharded import ShardServer
from liveweight.wire.messages.values import Offer, Shard
from tests.support.layouts import Bytes, Full, filled, fulls, placed, regions, tilings
from tests.support.wire import SECRET, soon
from tests.transports.test_transport_contract import blank, decoder, device, expected, memories

RANKS = 3
CELLS = [
    (name, where)
    for name, mode in sorted(TRANSPORTS.items())
    if mode.sharded and "frozen" in mode.offers
    for where in ("cpu", "cuda:0")
    if where.partition(":")[0] in mode.devices
]


@dataclass(slots=True)
class Trainer:
    """The transport sources of a trainer's ranks, and a reader of an engine's."""

    mode: Mode
    directory: Path
    transport_sources: list[TransportSource]
    reader: Reader
    arenas: list[Arena] = field(default_factory=list)

    def offer(self, layouts: Sequence[Layout], tensors: dict[str, Full], stack: ExitStack) -> Offer:
        """The shards of all ranks as one offer; the stack withdraws it."""
        shards, self.arenas = [], []
        for rank, (transport_source, layout) in enumerate(zip(self.transport_sources, layouts, strict=True)):
            arenas = [transport_source.allocate(size) for size in layout.memories_bytes]
            for arena, content in zip(arenas, filled(layout, tensors), strict=True):
                stack.callback(arena.close)
                arena.memory.tensor()[: len(content)] = torch.from_numpy(content)
            made = transport_source.offer(layout, arenas, "frozen")
            stack.callback(transport_source.withdraw, layout)
            self.arenas += arenas
            shards.append(
                Shard(rank=rank, source=made.source, layout=made.layout, generation=made.generation)
            )
        shard_server = ShardServer(f"ipc://{self.directory}/shards{id(stack):x}", SECRET, layouts)
        stack.callback(shard_server.close)
        named = "+".join(layout.fingerprint for layout in layouts)
        return Offer(
            mode=self.mode.name,
            kind="frozen",
            source=shard_server.address,
            layout=named,
            generation=0,
            shards=tuple(shards),
        )

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Bytes]) -> Reading:
        return self.reader.bind(offer, target, memories(shadow), soon())


@pytest.fixture(params=CELLS, ids="-".join)
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    name, where = request.param
    with tempfile.TemporaryDirectory(prefix="lw-") as place, ExitStack() as stack:
        directory, mode = Path(place), TRANSPORTS[name]
        transport_sources = []
        for _ in range(RANKS):
            transport_sources.append(mode.transport_source(directory, SECRET, device(where, directory)))
            stack.callback(transport_sources[-1].close)
        there = device(where, directory)
        reader = mode.reader(SECRET, there.choose().kernels, there)
        stack.callback(reader.close)
        yield Trainer(mode, directory, transport_sources, reader)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Full], list[Layout], Layout]:
    """Tensors whose tiles lie at ranks as they come, some twice, and a target that owns some boxes of them."""
    tensors = {name: draw(fulls(name=name, max_side=6)) for name in "ab"[: draw(st.integers(1, 2))]}
    held: list[list[tuple[TensorSpec, Region]]] = [[] for _ in range(RANKS)]
    for full in tensors.values():
        for tile in draw(tilings(full.spec.shape)):
            for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                held[rank].append((full.spec, tile))
    owned = [(t.spec, draw(regions(t.spec.shape))) for t in tensors.values() for _ in range(2)]
    layouts = [draw(placed(tiles)) for tiles in held]
    return tensors, layouts, draw(placed(owned))


@given(scene=scenes())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
def test_any_division_arrives_bit_for_bit_and_nothing_around_it_changes(
    trainer: Trainer, scene: tuple[dict[str, Full], list[Layout], Layout]
) -> None:
    tensors, layouts, target = scene
    shadow = blank(target)
    wanted = expected(target, tensors, shadow)
    with ExitStack() as stack:
        reading = trainer.bind(trainer.offer(layouts, tensors, stack), target, shadow)
        reading.check()
        reading.read(0, len(reading.rows))
        reading.check()
        reading.end()
    assert all(np.array_equal(a, b) for a, b in zip(shadow, wanted, strict=True))


def thirds(rows: int = 96) -> tuple[dict[str, Full], list[Layout], Layout]:
    """A decoder whose tensors are cut by rows, a third at each rank, and a target that needs them all."""
    tensors, _, target = decoder(rows)
    cuts = [(rank * rows // RANKS, (rank + 1) * rows // RANKS) for rank in range(RANKS)]
    layouts = [packed_regions([(t.spec, box(cut, (0, 64))) for t in tensors.values()]) for cut in cuts]
    return tensors, layouts, target


@pytest.mark.parametrize("moment", ["before binding", "while reading", "after reading"])
def test_a_raised_generation_of_any_rank_is_noticed_and_names_it(trainer: Trainer, moment: str) -> None:
    tensors, layouts, target = thirds()
    shadow = blank(target)
    with ExitStack() as stack:
        offer = trainer.offer(layouts, tensors, stack)

        def at(now: str) -> None:
            if now == moment:
                trainer.arenas[1].raise_generation()

        at("before binding")
        reading = trainer.bind(offer, target, shadow)
        reading.read(0, 1)
        at("while reading")
        reading.read(1, len(reading.rows))
        at("after reading")
        with pytest.raises(OfferChanged, match=r"trainer rank 1: .*generation"):
            reading.check()
        reading.end()


def test_a_rank_that_withdrew_its_part_is_named(trainer: Trainer) -> None:
    tensors, layouts, target = thirds()
    with ExitStack() as stack:
        offer = trainer.offer(layouts, tensors, stack)
        trainer.transport_sources[2].withdraw(layouts[2])
        with pytest.raises(VersionNotOffered, match="trainer rank 2: "):
            trainer.bind(offer, target, blank(target))


def test_a_rank_that_is_gone_is_named(trainer: Trainer) -> None:
    tensors, layouts, target = thirds()
    with ExitStack() as stack:
        offer = trainer.offer(layouts, tensors, stack)
        trainer.transport_sources[0].close()
        with pytest.raises(ChannelClosed, match="trainer rank 0: "):
            trainer.bind(offer, target, blank(target))


def test_parts_that_no_rank_holds_are_refused_before_a_byte_is_read(trainer: Trainer) -> None:
    tensors, layouts, target = thirds()
    with ExitStack() as stack:
        whole = trainer.offer(layouts, tensors, stack)
        lacking = Offer(
            mode=whole.mode,
            kind=whole.kind,
            source=whole.source,
            layout="two of three",
            generation=0,
            shards=whole.shards[:2],
        )
        with pytest.raises(LayoutInvalid, match="do not offer all of"):
            trainer.bind(lacking, target, blank(target))
