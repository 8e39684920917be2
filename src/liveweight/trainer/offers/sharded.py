"""Sharded offers: one offer of the shards that a trainer's ranks have frozen, each in its own arena. No bytes are gathered.

Owns the combination: layouts are compared once, and the digests of parts are added up in every round. The arenas belong to the ranks.
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
from liveweight.spec.manifest import KeptSet, Manifest, structure_of
from liveweight.trainer.offers.single_source import MadeOffer
from liveweight.wire.messages import AnnounceShards, Describe, ShardsFrozen
from liveweight.wire.messages.values import Offer, Shard


class ShardedOffers:
    """An OfferMaker. `set_frozen` takes the ranks' reports, and `make` then returns the offer. For the thread that runs rounds."""

    def __init__(
        self,
        announced: Sequence[AnnounceShards],
        *,
        mode: str,
        poll: Callable[[], None],
        bus: Bus,
        kept: KeptSet | None = None,
    ) -> None:
        """One announcement per rank. Raises LayoutInvalid if parts overlap, or if a part of a tensor has no owner."""
        self._announced, self._mode, self._poll, self._bus = list(announced), mode, poll, bus
        self._kept = kept
        self._digest_sums = DigestSums([rank.layout for rank in announced])
        self.manifest: Manifest = self._digest_sums.expected
        self.content = ContentDigest(self.manifest)
        self.structure = structure_of(packed(self.manifest.tensors).fingerprint, kept)
        self.size_bytes = self.manifest.size_bytes
        self._with_shards = [rank for rank in announced if rank.layout.memories_bytes[0]]
        self._layout = xxhash.xxh3_128_hexdigest(
            "".join(rank.layout.fingerprint for rank in self._with_shards).encode()
        )
        self.shard_server_address = ""
        """Where engine ranks get the shards' layouts (transports/sharded)."""
        self._made: MadeOffer | None = None

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the ranks that have shards."""
        return [rank.layout for rank in self._with_shards]

    def description(self) -> Describe:
        """See OfferMaker."""
        return Describe(structure=self.structure, manifest=self.manifest, kept=self._kept)

    def set_frozen(self, frozen: Mapping[int, ShardsFrozen]) -> None:
        """All ranks have frozen their shards. Raises DigestMismatch if ranks hold different copies of the same part."""
        partials = [
            lanes_from_bytes(frozen[rank.rank].lanes, len(rank.layout.placements)) for rank in self._announced
        ]
        totals, torn = self._digest_sums.combine(partials)
        if torn:
            raise DigestMismatch(torn, "the trainer's ranks hold different copies of one tensor")
        shards = tuple(
            Shard(
                rank=rank.rank,
                source=rank.source,
                layout=rank.layout.fingerprint,
                generation=frozen[rank.rank].generation,
            )
            for rank in self._with_shards
        )
        offer = Offer(
            mode=self._mode,
            kind="frozen",
            source=self.shard_server_address,
            layout=self._layout,
            generation=sum(shard.generation for shard in shards),
            shards=shards,
        )
        slowest_s = max(report.seconds for report in frozen.values())
        self._made = MadeOffer(offer=offer, lanes=totals, freeze_s=slowest_s, digest_s=0.0)

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """See OfferMaker: the offer of the last `set_frozen`."""
        del (
            kind,
            verify,
            release,
        )  # always frozen, with digests; the freeze has revoked the readers of the offer before
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
        self._poll()

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
