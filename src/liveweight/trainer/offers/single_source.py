"""Offers: a version held ready to be read: frozen into an arena, live where the parameters lie, or packed from there into a ring.

Owns the frozen arena and the moment at which memory may change: a generation is raised before, never after. How ranks reach the
memory is the transport source's, what is done with an offer is the drive's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from liveweight.devices.kernels import Kernels
from liveweight.errors import LiveWeightError, RoundFailed
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.rounds.report import FailedMode
from liveweight.spec.digest import ContentDigest, Lanes, to_hex
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest
from liveweight.trainer.offers.freeze import Freezer, offered_manifest
from liveweight.trainer.offers.live import SharedModule, live_digest, moved_since, why_not_live
from liveweight.trainer.offers.ring import RingOffers, RingTransportSource
from liveweight.trainer.offers.transfer_fallback import OpenMode, TransferFallback
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.stacked_experts import SplitSource, split_layout, splits_for
from liveweight.transports.packing_source import RingSettings
from liveweight.transports.port import Arena, TransportSource
from liveweight.wire.messages.values import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeOffer:
    """An offer that stands, and what it took. `lanes` are the digests of its tensors, where they were asked for; `failed_modes`, the
    transfer modes that were passed over for it."""

    offer: Offer
    lanes: Lanes | None
    freeze_s: float
    digest_s: float
    failed_modes: tuple[FailedMode, ...] = ()

    @property
    def digests(self) -> bytes | None:
        """The digests as they travel: 16 bytes per tensor, in the manifest's order."""
        return None if self.lanes is None else lanes_to_bytes(self.lanes)


class SingleSourceOffers:
    """Makes one offer at a time, for one manifest. Called from the thread that offers."""

    def __init__(
        self,
        *,
        source: Source,
        expected: Manifest,
        fallback: TransferFallback,
        kernels: Kernels,
        shared: SharedModule | None,
        threads: int,
        bus: Bus,
        ring: RingSettings | None = None,
    ) -> None:
        splits = splits_for(source.manifest(), expected)
        whole, source = source, SplitSource(source, splits) if splits else source
        own = source.manifest()
        self.manifest = offered_manifest(own, expected)
        self.content = ContentDigest(self.manifest)
        self.size_bytes = self.manifest.size_bytes
        """Bytes of one version."""
        self._source, self._whole = source, whole
        self._fallback, self._way = fallback, fallback.now
        self._live_layout = None if shared is None else split_layout(shared.layout, splits)
        self._kernels, self._shared, self._threads, self._bus = kernels, shared, threads, bus
        self._never_live = why_not_live(whole, expected, shared)
        self._invalidated = False
        self._freezer = Freezer(own, self.manifest, kernels)
        self.structure = self._freezer.layout.fingerprint
        """The name that rounds use for the manifest: the same only for the same tensors in the same order."""
        self._ring = RingOffers(source, own, self._freezer.layout, kernels, ring or RingSettings())
        self._arena: Arena | None = None
        self.current: Offer | None = None
        """The offer made last."""

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """Hold the source's current values ready. `release` waits for readers of the offer before, a while.

        A frozen offer always knows its digests, which ride on the copy; a live one only where they are to be verified. A live one
        is of the arena: whether the parameters still lie there, `invalidated` says, and it must be asked before anyone commits.
        """
        self._take(self._fallback.now)
        try:
            made = self._made(label, kind, verify=verify, release=release)
        except LiveWeightError as error:
            self._fallback.after_offering(error)
            raise
        return dataclasses.replace(made, failed_modes=self._fallback.failed_modes)

    def failed(self, error: RoundFailed) -> RoundFailed:
        """See OfferMaker: where it was the transfer mode that failed, the next offer is made over the next one."""
        return self._fallback.after(error)

    def _take(self, open_mode: OpenMode) -> None:
        """Make offers over that way from now on; nothing is left with the one before, and whoever still reads there is revoked."""
        if open_mode is self._way:
            return
        self._give_back()
        if self._live_layout is not None:
            self._transport_source.withdraw(self._live_layout)
        self._way = open_mode

    @property
    def _transport_source(self) -> TransportSource:
        return self._way.transport_source

    def _made(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        if kind not in self._way.mode.offers:
            return self.freeze(label, f"{self._way.mode.name} has none", release=release, kind=kind)
        if kind == "live":
            reason = self._why_not_live()
            if reason is None and self._shared is not None:
                made = self._live(label, self._shared, digest=verify)
                self.current = made.offer
                return made
            return self.freeze(label, reason or "nothing is shared", release=release)
        if kind == "ring":
            reason = self._ring.why_not()
            if reason is None:
                return self._packed(label, digest=verify)
            return self.freeze(label, reason, release=release, kind=kind)
        return self._frozen(label, release=release)

    def _why_not_live(self) -> str | None:
        """What is known without looking at every tensor. They are looked at here only if they had invalidated the last time."""
        if self._never_live is not None or self._shared is None:
            return self._never_live
        if self._invalidated or self._shared.closed:
            return moved_since(self._whole, self._shared)
        return None

    def invalidated(self, offer: Offer) -> str | None:
        """Why a live offer must not be committed: parameters that lie elsewhere by now. Asked while ranks read it, which many
        thousand tensors are worth; the parameters must not be moved meanwhile. None: it stands."""
        if offer.kind != "live" or self._shared is None:
            return None
        reason = moved_since(self._whole, self._shared)
        self._invalidated = reason is not None
        return reason

    def poll(self) -> None:
        """Nothing: what is read here is lost with this process alone."""

    def freeze(
        self, label: str, reason: str, *, release: Callable[[], None], kind: OfferKind = "live"
    ) -> MadeOffer:
        """Hold the current values ready frozen, where a live or a ring offer was asked for and that is why it cannot be."""
        self._bus.emit(events.LiveOfferImpossible(version=label, reason=reason, kind=kind))
        return self._frozen(label, release=release)

    def end(self, offer: Offer) -> None:
        """The parameters of a live or a ring offer may change from now on: whoever still reads is revoked."""
        if offer.kind == "ring":
            digest_sums = self._ring.end()
            for damaged in () if digest_sums is None else digest_sums.damaged:
                self._bus.emit(events.BucketDamaged(bucket=damaged.bucket, tensor=damaged.tensor))
        if offer.kind == "live" and self._shared is not None and not self._shared.closed:
            self._shared.arena.raise_generation()

    def staged(self, made: MadeOffer) -> MadeOffer:
        """All ranks have staged: with the digests that a ring's packing gave, where they are to be verified."""
        if made.offer.kind != "ring":
            return made
        began_s = time.monotonic()
        lanes = self._ring.digests()
        return dataclasses.replace(made, lanes=lanes, digest_s=time.monotonic() - began_s)

    def manifest_of(self, made: MadeOffer) -> Manifest | None:
        """The manifest with the digests of what was offered; None where those were not taken."""
        return (
            None if made.lanes is None else self.manifest.with_digests([to_hex(lane) for lane in made.lanes])
        )

    def close(self) -> None:
        """Give the frozen arena back, and let go of what a ring was packed from. A shared module stays its owner's."""
        self._ring.close()
        self._give_back()

    def _give_back(self) -> None:
        self._freezer.forget()
        if self._arena is not None:
            self._transport_source.withdraw(self._freezer.layout)
            self._arena.close()
            self._arena = None

    def _live(self, label: str, shared: SharedModule, *, digest: bool) -> MadeOffer:
        layout = shared.layout if self._live_layout is None else self._live_layout
        offer = self._transport_source.offer(layout, [shared.arena], "live")
        began_s = time.monotonic()
        lanes = live_digest(shared, self._kernels, self._threads, layout) if digest else None
        self._said(label, "live", layout)
        return MadeOffer(offer=offer, lanes=lanes, freeze_s=0.0, digest_s=time.monotonic() - began_s)

    def _packed(self, label: str, *, digest: bool) -> MadeOffer:
        transport_source = cast(
            "RingTransportSource", self._transport_source
        )  # the registry says which modes have rings
        self.current = offer = self._ring.make(transport_source, digest=digest)
        self._said(label, "ring", self._freezer.layout)
        return MadeOffer(offer=offer, lanes=None, freeze_s=0.0, digest_s=0.0)

    def _frozen(self, label: str, *, release: Callable[[], None]) -> MadeOffer:
        began_s = time.monotonic()
        layout = self._freezer.layout
        if self._arena is None:
            self._arena = self._transport_source.allocate(layout.memories_bytes[0])
        else:
            release()
            self._arena.raise_generation()
        frozen = self._freezer.freeze(self._source, self._arena.memory, threads=self._threads, digest=True)
        took_s = time.monotonic() - began_s
        self._bus.emit(events.SourceFrozen(version=label, rank=0, size_bytes=self.size_bytes, took_s=took_s))
        self.current = offer = self._transport_source.offer(layout, [self._arena], "frozen")
        self._said(label, "frozen", layout)
        return MadeOffer(offer=offer, lanes=frozen.lanes, freeze_s=took_s, digest_s=0.0)

    def _said(self, label: str, kind: OfferKind, layout: Layout) -> None:
        made = events.OfferMade(
            version=label, kind=kind, tensors=len(layout.tensors), size_bytes=layout.memories_bytes[0]
        )
        self._bus.emit(made)
