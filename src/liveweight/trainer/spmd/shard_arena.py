"""Where one rank of a trainer freezes its shards: an arena of its own, which engine ranks read.

Owns the arena, and raises its generation before its memory changes. RankZero and OtherRank decide when to freeze.
"""

from __future__ import annotations

from dataclasses import dataclass

from liveweight.devices.kernels import Kernels
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.layout import Layout
from liveweight.trainer.offers.freeze import Freezer
from liveweight.trainer.sources.dtensor_shards import ShardPlan
from liveweight.transports.port import Arena, TransportSource

NOTHING = Layout(tensors=(), memories_bytes=(0,), placements=())


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenShard:
    """What a freeze left: the arena's generation, the digests of its parts, 16 bytes each, and how long it took."""

    generation: int
    lanes: bytes
    seconds: float


class ShardArena:
    """For the thread that offers. A rank that holds nothing has no arena, and freezes nothing."""

    def __init__(
        self,
        cut: ShardPlan | None,
        transport_source: TransportSource | None,
        kernels: Kernels,
        *,
        rank: int,
        threads: int,
        bus: Bus,
    ) -> None:
        self._cut = cut
        self._transport_source = transport_source
        self._rank = rank
        self._threads = threads
        self._bus = bus
        self._freezer = None if cut is None else Freezer(cut.own, cut.offered, kernels, cut.parts)
        self._arena: Arena | None = None

    @property
    def layout(self) -> Layout:
        """Which parts of which tensors lie where in the arena."""
        return NOTHING if self._freezer is None else self._freezer.layout

    @property
    def source(self) -> str:
        """Where engine ranks attach; empty where there is nothing."""
        return "" if self._transport_source is None else self._transport_source.address

    def freeze(self, label: str) -> FrozenShard:
        """Copy, cast and digest what this rank holds now. Whoever still reads the version before is revoked; if it raises, nothing of the
        arena may be offered."""
        if self._freezer is None or self._cut is None or self._transport_source is None:
            return FrozenShard(generation=0, lanes=b"", seconds=0.0)
        layout = self._freezer.layout
        if self._arena is None:
            self._arena = self._transport_source.allocate(layout.memories_bytes[0])
        else:
            self._arena.raise_generation()
        memory = self._arena.memory
        frozen = self._freezer.freeze(self._cut.source, memory, threads=self._threads, digest=True)
        offer = self._transport_source.offer(layout, [self._arena], "frozen")
        facts = {"version": label, "rank": self._rank, "size_bytes": frozen.size_bytes}
        self._bus.emit(events.SourceFrozen(**facts, took_s=frozen.took_s))  # type: ignore[arg-type]
        lanes = b"" if frozen.lanes is None else lanes_to_bytes(frozen.lanes)
        return FrozenShard(generation=offer.generation, lanes=lanes, seconds=frozen.took_s)

    def close(self) -> None:
        """Close the arena and the transport source. May be called twice."""
        if self._freezer is not None:
            self._freezer.forget()
        if self._arena is not None and self._transport_source is not None:
            self._transport_source.withdraw(self.layout)
            self._arena.close()
            self._arena = None
        if self._transport_source is not None:
            self._transport_source.close()
