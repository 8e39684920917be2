"""To a source: from the ranks that read its memory."""

from __future__ import annotations

from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.wire.body import Body


class Attach(Body, frozen=True):
    """Where does the memory of this layout lie, for offers of this kind? -> Attached."""

    layout: str
    kind: OfferKind


class Attached(Body, frozen=True):
    """A source's layout, and per memory the token under which its descriptor is handed out (or the transport's own bytes)."""

    layout: Layout
    memories: tuple[bytes, ...]
    descriptors: str
