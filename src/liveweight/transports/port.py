"""The port of a transfer mode: a transport source in the publisher's process, a reader at each rank.

The source owns its memory and decides when it may change; ranks only ever read. Which bytes go where is plan/'s, when they become
visible is worker/'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from liveweight.devices.device import Device
from liveweight.devices.memory import Memory
from liveweight.errors import OfferChanged
from liveweight.observe.events import OfferKind
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.wire.messages.values import Offer

GoOn: TypeAlias = Callable[[], bool]
"""Whether a read is to wait longer. Called repeatedly in the reading thread while nothing arrives; raises at a deadline."""


def patient() -> bool:
    """Wait as long as it takes."""
    return True


def check_generation(offer: Offer, found: int) -> None:
    """Raise OfferChanged if a source's memory is not at the generation that it offered: what was read may be a mixture."""
    if found != offer.generation:
        raise OfferChanged(
            f"{offer.source} changed its memory: generation {found}, offered was {offer.generation}"
        )


class Arena(Protocol):
    """Source memory that ranks can read: allocated and faulted in once, kept across rounds. Owned by the publisher's process."""

    @property
    def device(self) -> Device:
        """Where the bytes are."""

    @property
    def memory(self) -> Memory:
        """The bytes, writable here and nowhere else."""

    @property
    def generation(self) -> int:
        """Raised before the bytes change; a rank that read under another generation has read nothing."""

    def raise_generation(self) -> int:
        """Revoke every reader of what the arena holds now; returns the new generation."""

    def close(self) -> None:
        """Give the memory back; ranks that still map it keep it until they unmap it."""


class TransportSource(Protocol):
    """The source half, one per publisher. `offer` and `withdraw` are called from its driver thread; serving is a thread of its own."""

    @property
    def address(self) -> str:
        """Where ranks attach."""

    def allocate(self, size_bytes: int, kind: OfferKind = "frozen", *, populated: bool = True) -> Arena:
        """Allocate an arena for offers of that kind, on the transport source's device. Raises OutOfMemory.

        `populated=False`: host memory is not faulted in, for a caller that gives other memory back while it fills the arena.
        """

    def offer(self, layout: Layout, arenas: Sequence[Arena], kind: OfferKind) -> Offer:
        """Let ranks read these arenas (one per memory of the layout), as they are now: waits for queued writes to them."""

    def withdraw(self, layout: Layout) -> None:
        """Stop offering that layout."""

    def close(self) -> None:
        """End the serving thread and remove the sockets. The owner of the arenas closes them."""


class Reading(Protocol):
    """One rank's part of one offer, bound to its shadow. Rows may be read by several threads at once, each row once."""

    @property
    def rows(self) -> Table:
        """The copies to make (plan/copies.COLUMNS), cut small enough to be shared out and interrupted."""

    @property
    def overlaps(self) -> bool:
        """Whether reads wait so long that digesting what has landed during the reads is better than after them."""

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:
        """Fill the shadow with rows [first, last). Returns when the bytes are there, or `go_on` said no; releases the GIL."""

    def check(self) -> None:
        """Raise OfferChanged if the source's memory changed since the offer was made. Called before the first read and after the last.

        A `read` that waits for bytes which will not come any more raises it too.
        """

    def end(self) -> None:
        """Called once when staging is over, however it ended: after it, nothing lands in the shadow any more."""


class Reader(Protocol):
    """The rank half; lives across rounds and keeps what can be kept. Called from the rank's staging thread."""

    def bind(self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline) -> Reading:
        """Attach to the offer's source if need be, plan if need be, and bind to this shadow.

        Raises Refused, naming both devices, if this rank cannot read the device of the source's memory.
        """

    def forget(self, source: str) -> None:
        """Drop what is kept about a source, after a failure: the next bind begins anew."""

    def close(self) -> None:
        """Release all mappings and channels."""
