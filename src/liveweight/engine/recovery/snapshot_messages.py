"""Messages between an engine and its ranks about snapshots: a closed set, apart from the step stream and the messages of rounds."""

from __future__ import annotations

from typing import TypeAlias

from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault


class RankPresent(Body, frozen=True):
    """A rank is connected, and will write on request. -> RankNoted."""

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
    """This snapshot is not needed any more: stop writing it."""

    number: int


class SnapshotWritten(Body, frozen=True):
    """The rank has written its files."""

    number: int
    rank: int
    size_bytes: int


class SnapshotNotWritten(Body, frozen=True):
    """The rank has not written its files. Without a fault: it holds other weights, or received StopWriting."""

    number: int
    rank: int
    fault: Fault | None = None


SavingMessage: TypeAlias = (
    RankPresent | RankNoted | WriteSnapshot | StopWriting | SnapshotWritten | SnapshotNotWritten
)
"""Every message."""
