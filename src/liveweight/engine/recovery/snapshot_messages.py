"""What an engine and its ranks say to each other about snapshots. A closed set, beside the step stream and the rounds' wire."""

from __future__ import annotations

from typing import TypeAlias

from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault


class RankPresent(Body, frozen=True):
    """A rank is there, and will write when it is told to. -> RankNoted."""

    rank: int


class RankNoted(Body, frozen=True):
    """The rank is known."""


class WriteSnapshot(Body, frozen=True):
    """Write your live weights into this directory, for the snapshot with this id, if you hold these weights.

    -> SnapshotWritten or SnapshotNotWritten.
    """

    number: int
    directory: str
    snapshot: str
    weights: str


class StopWriting(Body, frozen=True):
    """Nobody needs that one any more: write no further."""

    number: int


class SnapshotWritten(Body, frozen=True):
    """The rank's files are there."""

    number: int
    rank: int
    size_bytes: int


class SnapshotNotWritten(Body, frozen=True):
    """They are not. Without a fault: the rank holds other weights, or was told to leave it."""

    number: int
    rank: int
    fault: Fault | None = None


SavingMessage: TypeAlias = (
    RankPresent | RankNoted | WriteSnapshot | StopWriting | SnapshotWritten | SnapshotNotWritten
)
"""Every message."""
