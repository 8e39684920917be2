"""Between a rank and its replica's leader."""

from __future__ import annotations

from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Version
from liveweight.wire.body import Body
from liveweight.wire.values import Fault, Offer, RoundId


class Join(Body, frozen=True):
    """A rank reports for service: what it owns, what it serves. -> Joined."""

    rank: int
    pid: int
    layout: Layout
    serving: Version | None


class Joined(Body, frozen=True):
    """The rank belongs to this incarnation of the replica. `seat` is a number that no other process was or will be given."""

    replica: str
    boot: str
    seat: int


class Stage(Body, frozen=True):
    """Notification to a rank: read your regions of this offer into the shadow; verify if asked."""

    round: RoundId
    version: Version
    offer: Offer
    verify: bool
    timeout_s: float


class Staged(Body, frozen=True):
    """Notification from a rank: it has read all that it owns, and the source's generation still held."""

    round: RoundId
    rank: int
    size_bytes: int
    seconds: float


class Verified(Body, frozen=True):
    """Notification from a rank: the digests of its shadow, 16 bytes per placement of its layout."""

    round: RoundId
    rank: int
    lanes: bytes
    seconds: float


class Failed(Body, frozen=True):
    """Notification from a rank: its part of the round failed; its live weights are untouched."""

    round: RoundId
    fault: Fault


class Drop(Body, frozen=True):
    """Notification to a rank: the round is over, forget its shadow."""

    round: RoundId


class Dropped(Body, frozen=True):
    """Notification from a rank: it no longer reads that round's source."""

    round: RoundId
    rank: int


class Swapped(Body, frozen=True):
    """A rank has exchanged shadow and live weights, or failed to. It serves nothing until it is told the outcome. -> Settled.

    Ranks learn a decision by its epoch alone, so that is how they name the round here. `seat` is the one that Joined gave.
    """

    boot: str
    epoch: int
    rank: int
    seat: int
    seconds: float
    fault: Fault | None


class Settled(Body, frozen=True):
    """The outcome of a commit or undo: keep what you exchanged, or exchange it back."""

    keep: bool
    serving: Version | None
