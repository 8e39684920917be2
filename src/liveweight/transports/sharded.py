"""Sharded offers: offers of the shards of several trainer ranks, over any transfer mode that reads memory.

Owns both ends of the request that such an offer adds (GetShardLayout: which rank has which parts), and the reader that reads each part from
a rank that has it. A reader of the transfer mode reads the part; each trainer rank has its own, so that none disturbs another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, LiveWeightError, MessageInvalid, VersionNotOffered
from liveweight.plan.owners import divide
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.attach import AttachServer
from liveweight.transports.attachment_cache import evict_oldest
from liveweight.transports.port import GoOn, Reader, Reading, patient
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import GetShardLayout, Message, Refusal, ShardLayout
from liveweight.wire.messages.values import Offer, Shard, fault_of
from liveweight.wire.sockets import nobody_listens

_DIVISIONS_KEPT = 4


class ShardServer:
    """Answers engine ranks with the shard layouts of a trainer's ranks, on a thread of its own. Runs in the trainer's rank 0."""

    def __init__(self, address: str, secret: Secret, layouts: Sequence[Layout]) -> None:
        self._layouts = {layout.fingerprint: layout for layout in layouts}
        self._server = AttachServer(
            address, secret, WireLimits(), self._reply, name="liveweight-shard-server", request=GetShardLayout
        )
        self._server.start()

    @property
    def address(self) -> str:
        """Where engine ranks connect."""
        return self._server.address

    def close(self) -> None:
        """End the thread and remove the socket. May be called twice."""
        self._server.close()

    def _reply(self, body: GetShardLayout) -> Message:
        known = self._layouts.get(body.layout)
        if known is None:
            refused = VersionNotOffered(f"layout {body.layout}", list(self._layouts))
            return Refusal(fault=fault_of(refused, step="attach"))
        return ShardLayout(layout=known)


class _CountingReader(Reader, Protocol):
    @property
    def requests(self) -> int: ...


class ShardedReader:
    """Reads offers of one source as its mode does, and offers of many part by part. One per rank, used by its staging thread."""

    def __init__(self, make: Callable[[], _CountingReader], secret: Secret) -> None:
        """`make` makes a reader of the mode."""
        self._make, self._secret = make, secret
        self._whole = make()
        self._readers: dict[str, _CountingReader] = {}
        self._layouts: dict[str, Layout] = {}
        self._divisions: dict[tuple[str, str], tuple[Layout | None, ...]] = {}
        self._prefer = secrets.randbelow(
            1 << 16
        )  # so that the ranks of an engine do not all begin at one source
        self._shard_server: str | None = None

    @property
    def requests(self) -> int:
        """How often a source was asked where its memory lies."""
        return self._whole.requests + sum(reader.requests for reader in self._readers.values())

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline) -> Reading:
        """See Reader. Errors name the trainer's rank whose part could not be read."""
        if not offer.shards:
            self._close_readers(keep=set())  # readers of an earlier trainer would keep its memory alive
            return self._whole.bind(offer, target, shadow, deadline)
        self._whole.close()
        self._shard_server = offer.source
        self._close_readers(keep={shard.source for shard in offer.shards})
        parts = self._division(offer, target, deadline)
        order = [(n + self._prefer) % len(parts) for n in range(len(parts))]
        readings: list[tuple[Shard, Reading]] = []
        try:
            for number in order:
                shard, part = offer.shards[number], parts[number]
                if part is not None:
                    with _naming_rank(shard):
                        reader = self._readers.get(shard.source) or self._readers.setdefault(
                            shard.source, self._make()
                        )
                        readings.append((shard, reader.bind(_offer_of(offer, shard), part, shadow, deadline)))
        except BaseException:
            for _, reading in readings:
                reading.end()
            raise
        return ShardedReading(readings)

    def forget(self, source: str) -> None:
        """See Reader: also drops what is kept about the ranks behind that shard server."""
        self._whole.forget(source)
        if source == self._shard_server:
            self._close_readers(keep=set())
            self._layouts.clear()
            self._divisions.clear()

    def close(self) -> None:
        """See Reader."""
        self._close_readers(keep=set())
        self._whole.close()

    def _close_readers(self, keep: set[str]) -> None:
        for source in [source for source in self._readers if source not in keep]:
            self._readers.pop(source).close()

    def _division(self, offer: Offer, target: Layout, deadline: Deadline) -> tuple[Layout | None, ...]:
        """Which part of the target comes from which rank: made once for these layouts."""
        key = (offer.layout, target.fingerprint)
        found = self._divisions.pop(key, None)
        if found is None:
            layouts = self._shard_layouts(offer, deadline)
            sources = [layouts[shard.layout] for shard in offer.shards]
            found = divide(target, sources, prefer=self._prefer)
        self._divisions[key] = found
        evict_oldest(self._divisions, _DIVISIONS_KEPT)
        return found

    def _shard_layouts(self, offer: Offer, deadline: Deadline) -> Mapping[str, Layout]:
        wanted = {shard.layout for shard in offer.shards}
        self._layouts = {name: layout for name, layout in self._layouts.items() if name in wanted}
        missing = wanted - set(self._layouts)
        if missing:
            self._layouts |= get_shard_layout(offer.source, sorted(missing), self._secret, deadline)
        return self._layouts


class ShardedReading:
    """A rank's part of one offer of many: the rows of one reading after the other's."""

    def __init__(self, readings: Sequence[tuple[Shard, Reading]]) -> None:
        self._readings = tuple(readings)
        self._ends: list[int] = np.cumsum([0, *(len(reading.rows) for _, reading in readings)]).tolist()
        self.overlaps = all(reading.overlaps for _, reading in readings)
        tables = [reading.rows for _, reading in readings]
        self.rows: Table = np.concatenate(tables) if tables else np.empty((0, 11), dtype=np.int64)

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """See Reading."""
        for (shard, reading), begin, end in zip(self._readings, self._ends[:-1], self._ends[1:], strict=True):
            if first < end and begin < last:
                with _naming_rank(shard):
                    reading.read(max(first, begin) - begin, min(last, end) - begin, go_on)

    def check(self) -> None:
        """See Reading."""
        for shard, reading in self._readings:
            with _naming_rank(shard):
                reading.check()

    def end(self) -> None:
        """See Reading."""
        for _, reading in self._readings:
            reading.end()


def get_shard_layout(
    source: str, layouts: Sequence[str], secret: Secret, deadline: Deadline
) -> dict[str, Layout]:
    """Get the layouts of shards from the trainer's rank 0."""
    if nobody_listens(source, deadline):
        raise ChannelClosed(f"trainer rank 0 is gone: nobody listens at {source}")
    found: dict[str, Layout] = {}
    with Channel(source, secret, Codec[Message](Message), deadline=deadline, waits=False) as channel:
        for wanted in layouts:
            reply = channel.request(
                GetShardLayout(layout=wanted), deadline, "trainer rank 0 to send the layouts of its shards"
            )
            match reply:
                case ShardLayout(layout=layout) if layout.fingerprint == wanted:
                    found[wanted] = layout
                case Refusal(fault=fault):
                    raise fault.to_error()
                case _:
                    raise MessageInvalid(f"{source} answered with {type(reply).__name__}")
    return found


def _offer_of(offer: Offer, shard: Shard) -> Offer:
    """A shard as an offer of its own."""
    return Offer(
        mode=offer.mode,
        kind=offer.kind,
        source=shard.source,
        layout=shard.layout,
        generation=shard.generation,
    )


@contextmanager
def _naming_rank(shard: Shard) -> Iterator[None]:
    """Name the trainer's rank in errors."""
    try:
        yield
    except LiveWeightError as error:
        raise type(error).retold(f"trainer rank {shard.rank}: {error}") from error
