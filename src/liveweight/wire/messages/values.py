"""Values that messages are made of: round ids, offers, faults."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from liveweight.errors import LiveWeightError, catalogue
from liveweight.observe.events import OfferKind

KvPolicy: TypeAlias = Literal["recompute", "reuse", "drop"]
"""What happens to requests that run at a commit: their KV is rebuilt under the new weights; they go on with the old; they are ended."""


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of messages."""


class RoundId(_Value, frozen=True):
    """Which round: the replica's incarnation, its epoch, and who opened it. A message with another id has no effect."""

    boot: str
    epoch: int
    publisher: str


class Shard(_Value, frozen=True):
    """What one rank of a trainer holds of an offer: where it lies, its layout, and the generation that must still hold."""

    rank: int
    source: str
    layout: str
    generation: int


class Offer(_Value, frozen=True):
    """Where ranks read a version: the transfer mode, the source's address, its layout, and the generation that must still hold.

    With `shards`, each of them has a part of it, and `source` only says which (GetShardLayout); `layout` names all their layouts together.
    """

    mode: str
    kind: OfferKind
    source: str
    layout: str
    generation: int
    shards: tuple[Shard, ...] = ()


class RingGeometry(_Value, frozen=True):
    """A source's ring: the address where ranks subscribe, and the number and size of its segments, side by side in one memory."""

    address: str
    segments: int
    segment_bytes: int


class RankTimes(_Value, frozen=True):
    """What one rank did in a round, in seconds that it measured itself: reading, digesting, swapping with the hooks. `unread`: of this many
    tensors only the copy that they were installed from was read."""

    rank: int
    staged_bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    swap_s: float = 0.0
    unread: int = 0


class Mismatch(_Value, frozen=True):
    """A tensor that is not what it should be, and the ranks whose part of it is not, where that can be told."""

    name: str
    ranks: tuple[int, ...]


class Overwritten(_Value, frozen=True):
    """A rank's part of a commit in place. `begun`: live memory was written to. `lanes` are the digests of what is live then, where it was
    to be verified."""

    begun: bool
    size_bytes: int = 0
    stage_s: float = 0.0
    verify_s: float = 0.0
    lanes: bytes | None = None


class Fault(_Value, frozen=True):
    """An error that crosses processes: its code and text, which rank, in which step, after how long."""

    code: str
    message: str
    step: str
    rank: int | None = None
    waited_s: float = 0.0

    def to_error(self) -> LiveWeightError:
        """The error of that code, with that text."""
        kind = next((k for k in catalogue() if k.code == self.code), LiveWeightError)
        return kind.retold(self.message)


def fault_of(error: LiveWeightError, *, step: str, rank: int | None = None, waited_s: float = 0.0) -> Fault:
    """An error as it travels."""
    return Fault(code=error.code, message=str(error), step=step, rank=rank, waited_s=waited_s)
