"""The port between a publisher and the maker of its offers: single_source.py for one source, sharded.py for the shards of a trainer's
ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from liveweight.errors import RoundFailed
from liveweight.observe.events import OfferKind
from liveweight.spec.digest import ContentDigest
from liveweight.spec.manifest import Manifest
from liveweight.wire.messages import Describe
from liveweight.wire.messages.values import Offer

if TYPE_CHECKING:
    from liveweight.trainer.offers.single_source import MadeOffer


class OfferMaker(Protocol):
    """Makes one offer at a time, for one manifest. Called from the thread that offers; `invalidated` and `poll` from the round's
    thread."""

    manifest: Manifest
    content: ContentDigest
    structure: str
    size_bytes: int

    def description(self) -> Describe:
        """What replicas are told of the offers: their tensors, and those that engines keep."""

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """Offer the current values. `release` waits a limited time for readers of the offer before."""

    def freeze(
        self, label: str, reason: str, *, release: Callable[[], None], kind: OfferKind = "live"
    ) -> MadeOffer:
        """Fall back to a frozen offer; `reason` says why an offer of that kind is not possible."""

    def invalidated(self, offer: Offer) -> str | None:
        """Why a live offer must not be committed; None: it stands."""

    def poll(self) -> None:
        """Called repeatedly while ranks stage: raises if the offered memory is about to be lost."""

    def staged(self, made: MadeOffer) -> MadeOffer:
        """All ranks have staged: the offer with the digests that are known only now."""

    def end(self, offer: Offer) -> None:
        """The parameters of a live offer may change from now on."""

    def failed(self, error: RoundFailed) -> RoundFailed:
        """Returns the error to raise for a failed round of the last offer. Runs in the round's thread, before the next offer."""

    def manifest_of(self, made: MadeOffer) -> Manifest | None:
        """The manifest with the digests of the offer; None if no digests were taken."""

    def close(self) -> None:
        """Release the offered memory."""
