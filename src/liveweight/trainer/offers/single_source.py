"""Offers of one source: a version that ranks can read, frozen into an arena, live where the parameters lie, or packed into a ring.

Owns the frozen arena and the moment at which memory may change: the generation is raised before, never after. How ranks reach the memory
is the transport source's. Rounds are the coordinator's (rounds/coordinator).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from liveweight.devices.kernels import Kernels
from liveweight.errors import LiveWeightError, RoundFailed, WrongState
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.observe.events import OfferKind
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.rounds.report import FailedMode
from liveweight.spec.digest import ContentDigest, Lanes, to_hex
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, structure_of
from liveweight.trainer.offers.freeze import Freezer, offered_manifest
from liveweight.trainer.offers.live import SharedModule, live_digest, moved_since, why_not_live
from liveweight.trainer.offers.ring import RingOffers, RingTransportSource
from liveweight.trainer.offers.transfer_fallback import OpenMode, TransferFallback
from liveweight.trainer.sources.kept_tensors import NOTHING_KEPT, KeepPlan
from liveweight.trainer.sources.one_shot_source import OneShotSource
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.stacked_experts import SplitSource, split_layout, splits_for
from liveweight.transports.packing_source import RingSettings
from liveweight.transports.port import Arena, TransportSource
from liveweight.wire.messages import Describe
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
        expected: Manifest | None,
        fallback: TransferFallback,
        kernels: Kernels,
        shared: SharedModule | None,
        threads: int,
        bus: Bus,
        ring: RingSettings | None = None,
        keep: KeepPlan = NOTHING_KEPT,
        dtype: DType | None = None,
    ) -> None:
        """`expected` None, of a one-shot source without engines: the first offer learns the manifest, floats in `dtype` if it is given, and
        `manifest`, `content`, `size_bytes` and `structure` exist from then on."""
        self._fallback, self._open_mode = fallback, fallback.now
        self._kernels, self._shared, self._threads, self._bus = kernels, shared, threads, bus
        self._ring_settings, self._dtype, self._keep = ring or RingSettings(), dtype, keep
        self._invalidated = False
        self._said: tuple[OfferKind, str] | None = None
        self._live_layout: Layout | None = None
        self._freezer: Freezer | None = None
        self._ring: RingOffers | None = None
        self._arena: Arena | None = None
        self.current: Offer | None = None
        """The offer made last."""
        self._source = source
        if expected is not None:
            self._use_manifest(expected)

    def _use_manifest(self, expected: Manifest) -> None:
        """Offer the source's tensors as engines expect them from now on."""
        self._whole, source = self._keep.reduce(self._source, expected)
        splits = splits_for(source.manifest(), expected)
        self._source = SplitSource(source, splits) if splits else source
        own = self._source.manifest()
        self.manifest = offered_manifest(own, expected)
        self.content = ContentDigest(self.manifest)
        self.size_bytes = self.manifest.size_bytes
        """Bytes of one version."""
        if self._shared is not None:
            self._live_layout = split_layout(self._shared.layout.without(self._keep.left_out), splits)
        self._never_live = why_not_live(self._whole, expected, self._shared)
        self._freezer = Freezer(own, self.manifest, self._kernels)
        self.structure = structure_of(self._freezer.layout.fingerprint, self._keep.kept)
        self._ring = RingOffers(self._source, own, self._freezer.layout, self._kernels, self._ring_settings)

    def description(self) -> Describe:
        """See OfferMaker."""
        return Describe(structure=self.structure, manifest=self.manifest, kept=self._keep.kept)

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """Offer the source's current values. `release` waits a limited time for readers of the offer before.

        A frozen offer always knows its digests, which ride on the copy; a live one only where they are to be verified. A live one
        is of the arena: call `invalidated` before anyone commits, to check that the parameters still lie there.
        """
        self._use(self._fallback.now)
        try:
            if self._freezer is None and isinstance(self._source, OneShotSource):
                self._use_manifest(self._source.learn(self._dtype))
            made = self._make(label, kind, verify=verify, release=release)
        except LiveWeightError as error:
            self._fallback.after_offering(error)
            raise
        return dataclasses.replace(made, failed_modes=self._fallback.failed_modes)

    def failed(self, error: RoundFailed) -> RoundFailed:
        """See OfferMaker: if the transfer mode failed, the next offer uses the next mode."""
        return self._fallback.after(error)

    def _use(self, open_mode: OpenMode) -> None:
        """Make offers over that mode from now on. Offers of the mode before are withdrawn, and their readers revoked."""
        if open_mode is self._open_mode:
            return
        self._close_arena()
        if self._live_layout is not None:
            self._transport_source.withdraw(self._live_layout)
        self._open_mode = open_mode

    @property
    def _frozen_by(self) -> Freezer:
        if self._freezer is None:
            raise WrongState("without a first offer, which learns the manifest", "freezing")
        return self._freezer

    @property
    def _layout(self) -> Layout:
        return self._frozen_by.layout

    @property
    def _rings(self) -> RingOffers:
        if self._ring is None:
            raise WrongState("without a first offer, which learns the manifest", "packing a ring")
        return self._ring

    @property
    def _transport_source(self) -> TransportSource:
        return self._open_mode.transport_source

    def _make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        if kind not in self._open_mode.mode.offers:
            return self.freeze(label, f"{self._open_mode.mode.name} has none", release=release, kind=kind)
        if kind == "live":
            reason = self._why_not_live()
            if reason is None and self._shared is not None:
                made = self._live(label, self._shared, digest=verify)
                self._said = None
                self.current = made.offer
                return made
            return self.freeze(label, reason or "nothing is shared", release=release)
        if kind == "ring":
            reason = self._rings.why_not()
            if reason is None:
                self._said = None
                return self._packed(label, digest=verify)
            return self.freeze(label, reason, release=release, kind=kind)
        return self._frozen(label, release=release)

    def _why_not_live(self) -> str | None:
        """Why a live offer is not possible. Checks every tensor only if a tensor had moved the last time."""
        if self._never_live is not None or self._shared is None:
            return self._never_live
        if self._invalidated or self._shared.closed:
            return moved_since(self._whole, self._shared)
        return None

    def invalidated(self, offer: Offer) -> str | None:
        """Why a live offer must not be committed: a parameter that has moved. None: none has. Checked while ranks read, because it takes
        time with many thousand tensors; nobody may move parameters meanwhile."""
        if offer.kind != "live" or self._shared is None:
            return None
        reason = moved_since(self._whole, self._shared)
        self._invalidated = reason is not None
        return reason

    def poll(self) -> None:
        """See OfferMaker: never raises, because the offered memory is lost only with this process."""

    def freeze(
        self, label: str, reason: str, *, release: Callable[[], None], kind: OfferKind = "live"
    ) -> MadeOffer:
        """Fall back to a frozen offer; `reason` says why a live or ring offer is not possible. The reason is emitted once, and again only
        after it changed or such an offer was possible."""
        if self._said != (kind, reason):
            self._said = kind, reason
            self._bus.emit(events.LiveOfferImpossible(version=label, reason=reason, kind=kind))
        return self._frozen(label, release=release)

    def end(self, offer: Offer) -> None:
        """The parameters of a live or a ring offer may change from now on: its readers are revoked."""
        if offer.kind == "ring":
            counts = self._rings.end()
            for damaged in () if counts is None else counts.damaged:
                self._bus.emit(events.BucketDamaged(bucket=damaged.bucket, tensor=damaged.tensor))
        if offer.kind == "live" and self._shared is not None and not self._shared.closed:
            self._shared.arena.raise_generation()

    def staged(self, made: MadeOffer) -> MadeOffer:
        """All ranks have staged: with the digests that a ring's packing gave, where they are to be verified."""
        if made.offer.kind != "ring":
            return made
        began_s = time.monotonic()
        lanes = self._rings.digests()
        return dataclasses.replace(made, lanes=lanes, digest_s=time.monotonic() - began_s)

    def manifest_of(self, made: MadeOffer) -> Manifest | None:
        """See OfferMaker."""
        return (
            None if made.lanes is None else self.manifest.with_digests([to_hex(lane) for lane in made.lanes])
        )

    def close(self) -> None:
        """Close the frozen arena and release the tensors of a ring offer. A shared module belongs to its owner."""
        if self._ring is not None:
            self._ring.close()
        self._close_arena()

    def _close_arena(self) -> None:
        if self._freezer is not None:
            self._freezer.forget()
        if self._arena is not None:
            self._transport_source.withdraw(self._layout)
            self._arena.close()
            self._arena = None

    def _live(self, label: str, shared: SharedModule, *, digest: bool) -> MadeOffer:
        layout = shared.layout if self._live_layout is None else self._live_layout
        offer = self._transport_source.offer(layout, [shared.arena], "live")
        began_s = time.monotonic()
        lanes = live_digest(shared, self._kernels, self._threads, layout) if digest else None
        self._emit_offer_made(label, "live", layout)
        return MadeOffer(offer=offer, lanes=lanes, freeze_s=0.0, digest_s=time.monotonic() - began_s)

    def _packed(self, label: str, *, digest: bool) -> MadeOffer:
        transport_source = cast(
            "RingTransportSource", self._transport_source
        )  # the registry says which modes have rings
        self.current = offer = self._rings.make(transport_source, digest=digest)
        self._emit_offer_made(label, "ring", self._layout)
        return MadeOffer(offer=offer, lanes=None, freeze_s=0.0, digest_s=0.0)

    def _frozen(self, label: str, *, release: Callable[[], None]) -> MadeOffer:
        began_s = time.monotonic()
        freezer, layout = self._frozen_by, self._layout
        if self._arena is None:
            # The copies of a first pass are given back one by one while the arena fills: both are never there whole.
            learned = isinstance(self._source, OneShotSource) and self._source.learned
            self._arena = self._transport_source.allocate(layout.memories_bytes[0], populated=not learned)
        else:
            release()
            self._arena.raise_generation()
        frozen = freezer.freeze(self._source, self._arena.memory, threads=self._threads, digest=True)
        took_s = time.monotonic() - began_s
        self._bus.emit(events.SourceFrozen(version=label, rank=0, size_bytes=self.size_bytes, took_s=took_s))
        self.current = offer = self._transport_source.offer(layout, [self._arena], "frozen")
        self._emit_offer_made(label, "frozen", layout)
        return MadeOffer(offer=offer, lanes=frozen.lanes, freeze_s=took_s, digest_s=0.0)

    def _emit_offer_made(self, label: str, kind: OfferKind, layout: Layout) -> None:
        made = events.OfferMade(
            version=label, kind=kind, tensors=len(layout.tensors), size_bytes=layout.memories_bytes[0]
        )
        self._bus.emit(made)
