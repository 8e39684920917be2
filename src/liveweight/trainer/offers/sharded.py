"""The offer that a trainer's ranks hold together: made of what each of them has frozen, without a byte of it moving.

Owns the sum: layouts are compared once, digests of parts are added up in every round. The arenas are the ranks' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import xxhash

from liveweight.errors import DigestMismatch, RoundFailed, WrongState
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.spec.digest import ContentDigest, to_hex
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import Manifest
from liveweight.trainer.offers.single_source import MadeOffer
from liveweight.wire.messages import AnnounceShards, ShardsFrozen
from liveweight.wire.messages.values import Offer, Shard


class ShardedOffers:
    """An Offering. `stand` brings what the ranks have frozen, and `make` then is the offer of it. In the thread that drives rounds."""

    def __init__(
        self, stations: Sequence[AnnounceShards], *, mode: str, poll: Callable[[], None], bus: Bus
    ) -> None:
        """One station per rank. LayoutInvalid where their parts overlap, or leave something of a tensor to nobody."""
        self._stations, self._mode, self._look, self._bus = list(stations), mode, poll, bus
        self._digest_sums = DigestSums([station.layout for station in stations])
        self.manifest: Manifest = self._digest_sums.expected
        self.content = ContentDigest(self.manifest)
        self.structure = packed(self.manifest.tensors).fingerprint
        self.size_bytes = self.manifest.size_bytes
        self._holding = [station for station in stations if station.layout.memories_bytes[0]]
        self._layout = xxhash.xxh3_128_hexdigest(
            "".join(station.layout.fingerprint for station in self._holding).encode()
        )
        self.survey = ""
        """Where engine ranks ask who holds what."""
        self._made: MadeOffer | None = None

    @property
    def layouts(self) -> list[Layout]:
        """What the ranks hold."""
        return [station.layout for station in self._holding]

    def stand(self, frozen: Mapping[int, ShardsFrozen]) -> None:
        """All ranks have frozen their shards. DigestMismatch where ranks hold different copies of the same part."""
        partials = [
            lanes_from_bytes(frozen[station.rank].lanes, len(station.layout.placements))
            for station in self._stations
        ]
        totals, torn = self._digest_sums.combine(partials)
        if torn:
            raise DigestMismatch(torn, "the trainer's ranks hold different copies of one tensor")
        shards = tuple(
            Shard(
                rank=station.rank,
                source=station.source,
                layout=station.layout.fingerprint,
                generation=frozen[station.rank].generation,
            )
            for station in self._holding
        )
        offer = Offer(
            mode=self._mode,
            kind="frozen",
            source=self.survey,
            layout=self._layout,
            generation=sum(shard.generation for shard in shards),
            shards=shards,
        )
        slowest_s = max(report.seconds for report in frozen.values())
        self._made = MadeOffer(offer=offer, lanes=totals, freeze_s=slowest_s, digest_s=0.0)

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """See OfferMaker: what was brought last."""
        del kind, verify, release  # frozen, with its digests; the freeze has revoked who read the one before
        if self._made is None:
            raise WrongState("nothing was frozen", "offer")
        made, self._made = self._made, None
        self._bus.emit(
            events.OfferMade(
                version=label,
                kind="frozen",
                tensors=len(self.manifest.tensors),
                size_bytes=sum(layout.memories_bytes[0] for layout in self.layouts),
            )
        )
        return made

    def freeze(
        self, label: str, reason: str, *, release: Callable[[], None], kind: OfferKind = "live"
    ) -> MadeOffer:
        """See OfferMaker; here nothing is ever live."""
        del label, reason, release, kind
        raise WrongState("shards are never offered live", "freeze")

    def staged(self, made: MadeOffer) -> MadeOffer:
        """See OfferMaker: every digest came with the freeze."""
        return made

    def invalidated(self, offer: Offer) -> str | None:
        """See OfferMaker."""
        del offer
        return None

    def poll(self) -> None:
        """See OfferMaker: raises where a rank of the trainer is gone."""
        self._look()

    def end(self, offer: Offer) -> None:
        """See OfferMaker."""

    def failed(self, error: RoundFailed) -> RoundFailed:
        """See OfferMaker: there is one transfer mode."""
        return error

    def manifest_of(self, made: MadeOffer) -> Manifest | None:
        """See OfferMaker."""
        return (
            None if made.lanes is None else self.manifest.with_digests([to_hex(lane) for lane in made.lanes])
        )

    def close(self) -> None:
        """See OfferMaker: the arenas are the ranks' own."""
