"""What an engine and its ranks say to each other about snapshots. A closed set, beside the step stream and the rounds' wire."""

from __future__ import annotations

from typing import TypeAlias

from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault


class Present(Body, frozen=True):
    """A rank is there, and will write when it is told to. -> Noted."""

    rank: int


class Noted(Body, frozen=True):
    """The rank is known."""


class Write(Body, frozen=True):
    """Write what you hold live into this directory, for the snapshot with this id, if it is these weights. -> Written or NotWritten."""

    number: int
    directory: str
    snapshot: str
    weights: str


class Leave(Body, frozen=True):
    """Nobody needs that one any more: write no further."""

    number: int


class Written(Body, frozen=True):
    """The rank's files are there."""

    number: int
    rank: int
    size_bytes: int


class NotWritten(Body, frozen=True):
    """They are not. Without a fault: the rank holds other weights, or was told to leave it."""

    number: int
    rank: int
    fault: Fault | None = None


SavingMessage: TypeAlias = Present | Noted | Write | Leave | Written | NotWritten
"""Every message."""
