"""Between a rank and its replica's leader."""

from __future__ import annotations

from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, OptionalGroup, Version
from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault, Offer, Overwritten, RoundId


class Join(Body, frozen=True):
    """A rank joins its replica: what it owns, what it serves, which tensors an offer may leave out. -> Joined.

    The groups of `optional` have the tensors of the whole replica: every rank says the same. Where they are known, `lanes` are the digests
    of what it holds, 16 bytes per placement, and `manifest` has the tensors of the version with theirs; one rank is enough.
    `host` is where its `pid` means something. `in_place`: it has no shadow, and a commit overwrites what is live. `met`: the handshake
    token that a controller sent to its engine; a leader without that token belongs to another engine, and refuses the rank.
    """

    rank: int
    pid: int
    layout: Layout
    serving: Version | None
    optional: tuple[OptionalGroup, ...] = ()
    lanes: bytes | None = None
    manifest: Manifest | None = None
    host: str = ""
    in_place: bool = False
    met: str = ""


class Joined(Body, frozen=True):
    """The rank belongs to this incarnation of the replica. `seat` is a number that no other process was or will be given."""

    replica: str
    boot: str
    seat: int


class Stage(Body, frozen=True):
    """Notification to a rank: read your regions of this offer into the shadow; verify if asked. In place: locate them, read nothing yet.

    Of the tensors in `keep` the offer has nothing: the shadow gets what is live. `unchanged`: what is live has the version's content, so
    there is nothing to read, and its commit swaps nothing.
    """

    round: RoundId
    version: Version
    offer: Offer
    verify: bool
    timeout_s: float
    keep: tuple[str, ...] = ()
    unchanged: bool = False


class Staged(Body, frozen=True):
    """Notification from a rank: it has read all that it owns, and the source's generation still held. In place: it can be read."""

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


class StagingFailed(Body, frozen=True):
    """Notification from a rank: its part of the round failed; its live weights are untouched."""

    round: RoundId
    fault: Fault


class DropShadow(Body, frozen=True):
    """Notification to a rank: the round is over, forget its shadow."""

    round: RoundId


class ShadowDropped(Body, frozen=True):
    """Notification from a rank: it no longer reads that round's source."""

    round: RoundId
    rank: int


class Swapped(Body, frozen=True):
    """A rank has swapped shadow and live weights, or failed to. It serves nothing until it is told the outcome. -> Settled.

    Ranks learn a decision by its epoch alone, so that is how they name the round here. `seat` is the one that Joined gave.
    In place it has read its regions into live memory, or failed to, and `overwritten` says how far it came. `unread` counts the tensors of
    which only the copy that they were installed from was ever read.
    """

    boot: str
    epoch: int
    rank: int
    seat: int
    seconds: float
    fault: Fault | None
    overwritten: Overwritten | None = None
    unread: int = 0


class Settled(Body, frozen=True):
    """The outcome of a commit or undo: keep what you swapped, or swap it back. `torn`: an overwriting failed somewhere, this is why,
    and no rank of the replica may serve."""

    keep: bool
    serving: Version | None
    torn: str | None = None


class DigestLive(Body, frozen=True):
    """Notification to a rank: digest what you hold live now, of these tensors, or all. Staging and decoding go on meanwhile."""

    audit: int
    names: tuple[str, ...] | None
    timeout_s: float


class LiveDigests(Body, frozen=True):
    """Notification from a rank: the digests of its live weights, 16 bytes per placement (zero for those not asked for).

    Without `lanes` it has none: its weights were swapped while it read them, or it failed. Where it digests a copy of what serves, it
    names the tensors that differ there, and those of which what serves cannot be read.
    """

    audit: int
    rank: int
    lanes: bytes | None
    seconds: float
    fault: Fault | None = None
    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
