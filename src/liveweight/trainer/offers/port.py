"""The port between a publisher and what makes its offers: one source (offers.py), or the shards of a trainer's ranks (gathered.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from liveweight.errors import RoundFailed
from liveweight.observe.events import OfferKind
from liveweight.spec.digest import ContentDigest
from liveweight.spec.manifest import Manifest
from liveweight.wire.messages.values import Offer

if TYPE_CHECKING:
    from liveweight.trainer.offers.single_source import MadeOffer


class OfferMaker(Protocol):
    """Makes one offer at a time, for one manifest. Called from the thread that offers; `invalidated` and `poll` from those that drive."""

    manifest: Manifest
    content: ContentDigest
    structure: str
    size_bytes: int

    def make(self, label: str, kind: OfferKind, *, verify: bool, release: Callable[[], None]) -> MadeOffer:
        """Hold the current values ready. `release` waits for readers of the offer before, a while."""

    def freeze(
        self, label: str, reason: str, *, release: Callable[[], None], kind: OfferKind = "live"
    ) -> MadeOffer:
        """Hold them ready frozen, where an offer of that kind was asked for and that is why it cannot be."""

    def invalidated(self, offer: Offer) -> str | None:
        """Why a live offer must not be committed; None: it stands."""

    def poll(self) -> None:
        """Called now and then while ranks stage: raises where what they read is about to be lost."""

    def staged(self, made: MadeOffer) -> MadeOffer:
        """All ranks have staged: the offer with the digests that are known only now."""

    def end(self, offer: Offer) -> None:
        """The parameters of a live offer may change from now on."""

    def failed(self, error: RoundFailed) -> RoundFailed:
        """A round of the last offer failed so; what to raise of it. In the thread that drives, before the next offer."""

    def manifest_of(self, made: MadeOffer) -> Manifest | None:
        """The manifest with the digests of what was offered; None where those were not taken."""

    def close(self) -> None:
        """Give back what was held."""
