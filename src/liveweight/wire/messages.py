"""The closed set of messages of a round: between publisher and leader, leader and ranks, ranks and source.

Every message but a notification is answered by exactly one of the replies that its docstring names, or by `Refusal`.
Durations travel, clock times never do. Weights never pass through here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.values import Fault, KvPolicy, Offer, RoundId

Phase: TypeAlias = Literal["open", "staged", "verified", "ready", "committing", "done", "failed"]
"""How far a round has come, in order; `done` and `failed` are ends."""
ORDER: dict[Phase, int] = {
    "open": 0,
    "staged": 1,
    "verified": 2,
    "ready": 3,
    "committing": 4,
    "done": 5,
    "failed": 6,
}


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; the tag is the class's name."""


class Refusal(_Message, frozen=True):
    """Instead of any reply: the request had no effect, for this reason; what serves meanwhile."""

    fault: Fault
    serving: Version | None = None


# Publisher to leader.


class Inquire(_Message, frozen=True):
    """What does the replica expect, and what does it serve? Answered once all its ranks have joined. -> Standing."""

    wait_s: float


class Standing(_Message, frozen=True):
    """A replica's standing: what it expects, what it serves, in which state, and the round that holds it."""

    replica: str
    boot: str
    state: str
    expected: Manifest
    serving: Version | None
    undo: Version | None
    round: RoundId | None


class Describe(_Message, frozen=True):
    """The tensors that a publisher will offer, said once; rounds name them by `structure`. -> Described."""

    structure: str
    manifest: Manifest


class Described(_Message, frozen=True):
    """The manifest fits what the replica expects."""


class Open(_Message, frozen=True):
    """Begin a round. `digests` holds 16 bytes per tensor of the structure, in its order; none: content unknown. -> Opened.

    `kv_policy` is for requests that run at its commit; None: as the engine is set.
    """

    publisher: str
    version: Version
    structure: str
    digests: bytes | None
    offer: Offer
    verify: bool
    timeout_s: float
    kv_policy: KvPolicy | None = None


class Opened(_Message, frozen=True):
    """The round is open, or, with `round` None, its version is installed already and there is nothing to do."""

    round: RoundId | None
    serving: Version | None


class Await(_Message, frozen=True):
    """Say when the round has come that far, or failed, or the wait is over. -> Progress."""

    round: RoundId
    until: Phase
    wait_s: float


class Progress(_Message, frozen=True):
    """How far a round has come; which ranks are missing from its next step; what failed."""

    phase: Phase
    missing: tuple[int, ...]
    fault: Fault | None
    stage_s: float
    verify_s: float
    staged_bytes: int
    readers: tuple[int, ...]


class Ask(_Message, frozen=True):
    """Ask for the vote. A yes is held for `lease_s`, from when it is given. -> Voted."""

    round: RoundId
    lease_s: float


class Voted(_Message, frozen=True):
    """Yes: every rank holds the version, verified if that was asked. (A no is a Refusal.)"""


class Commit(_Message, frozen=True):
    """Make the version visible at the next boundary, all ranks or none. -> Committed."""

    round: RoundId
    timeout_s: float


class Committed(_Message, frozen=True):
    """All ranks serve this version; how long the slowest stood still for it."""

    serving: Version | None
    undo: Version | None
    stall_s: float


class Abort(_Message, frozen=True):
    """Give the round up. Answered when no rank reads its source any more, or the wait is over. -> Aborted."""

    round: RoundId
    reason: str
    wait_s: float


class Aborted(_Message, frozen=True):
    """The round is over; these ranks may still be reading the source's memory."""

    readers: tuple[int, ...]


class Undo(_Message, frozen=True):
    """Go back to the version before, at the next boundary. -> Committed."""

    publisher: str
    timeout_s: float


# Rank to leader, and back.


class Join(_Message, frozen=True):
    """A rank reports for service: what it owns, what it serves. -> Joined."""

    rank: int
    pid: int
    layout: Layout
    serving: Version | None


class Joined(_Message, frozen=True):
    """The rank belongs to this incarnation of the replica. `seat` is a number that no other process was or will be given."""

    replica: str
    boot: str
    seat: int


class Stage(_Message, frozen=True):
    """Notification to a rank: read your regions of this offer into the shadow; verify if asked."""

    round: RoundId
    version: Version
    offer: Offer
    verify: bool
    timeout_s: float


class Staged(_Message, frozen=True):
    """Notification from a rank: it has read all that it owns, and the source's generation still held."""

    round: RoundId
    rank: int
    size_bytes: int
    seconds: float


class Verified(_Message, frozen=True):
    """Notification from a rank: the digests of its shadow, 16 bytes per placement of its layout."""

    round: RoundId
    rank: int
    lanes: bytes
    seconds: float


class Failed(_Message, frozen=True):
    """Notification from a rank: its part of the round failed; its live weights are untouched."""

    round: RoundId
    fault: Fault


class Drop(_Message, frozen=True):
    """Notification to a rank: the round is over, forget its shadow."""

    round: RoundId


class Dropped(_Message, frozen=True):
    """Notification from a rank: it no longer reads that round's source."""

    round: RoundId
    rank: int


class Swapped(_Message, frozen=True):
    """A rank has exchanged shadow and live weights, or failed to. It serves nothing until it is told the outcome. -> Settled.

    Ranks learn a decision by its epoch alone, so that is how they name the round here. `seat` is the one that Joined gave.
    """

    boot: str
    epoch: int
    rank: int
    seat: int
    seconds: float
    fault: Fault | None


class Settled(_Message, frozen=True):
    """The outcome of a commit or undo: keep what you exchanged, or exchange it back."""

    keep: bool
    serving: Version | None


# Rank to source.


class Attach(_Message, frozen=True):
    """Where does the memory of this layout lie, for offers of this kind? -> Attached."""

    layout: str
    kind: OfferKind


class Attached(_Message, frozen=True):
    """A source's layout, and per memory the token under which its descriptor is handed out (or the transport's own bytes)."""

    layout: Layout
    memories: tuple[bytes, ...]
    descriptors: str


Message: TypeAlias = (
    Refusal
    | Inquire
    | Standing
    | Describe
    | Described
    | Open
    | Opened
    | Await
    | Progress
    | Ask
    | Voted
    | Commit
    | Committed
    | Abort
    | Aborted
    | Undo
    | Join
    | Joined
    | Stage
    | Staged
    | Verified
    | Failed
    | Drop
    | Dropped
    | Swapped
    | Settled
    | Attach
    | Attached
)
