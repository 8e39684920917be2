"""The rank half of `ipc_snapshot`: finds the files of an offer, and binds them to the rank's shadow.

Owns nothing but plans: files are opened anew for every offer, since every offer is a new snapshot, and closed with its Reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, OfferChanged, SnapshotDamaged, SnapshotNotFound
from liveweight.plan.copies import CopyPlans
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Layout
from liveweight.transports.snapshot.block_reads import SnapshotReading
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.offer_record import (
    OfferRecord,
    directory_of,
    generation_of,
    generation_of_snapshot,
    is_snapshot,
    read_record,
)
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import Offer

_SOURCES_KEPT = 16


class SnapshotReader:
    """Reads offers whose files this process can see, to shadows on one device (None: the host). Used by the staging thread."""

    def __init__(self, secret: Secret, kernels: Kernels, *, device: Device | None = None) -> None:
        self._secret, self._kernels = secret, kernels
        self._device = CPU if device is None else device
        self._plans = CopyPlans()
        self._known: dict[tuple[str, str], None] = {}
        self.requests = 0
        """How often a source was opened for the first time."""

    def bind(
        self, offer: Offer, target: Layout, shadow: Sequence[Memory], deadline: Deadline
    ) -> SnapshotReading:
        """Open the offer's files, and bind them to this shadow. If a newer offer replaced the files meanwhile, it tries again."""
        directory = directory_of(offer.source)
        while True:
            deadline.check(f"the files of {offer.source}")
            if not directory.is_dir():
                raise ChannelClosed(f"{offer.source} is gone: there is no such directory")
            self._remember(offer)
            if is_snapshot(directory):
                return self._bind_snapshot(directory, offer, target, shadow)
            record = read_record(directory, offer.kind, offer.layout, self._secret)
            try:
                return self._bind_record(directory, record, offer, target, shadow)
            except (SnapshotNotFound, SnapshotDamaged):
                if read_record(directory, offer.kind, offer.layout, self._secret) == record:
                    raise

    def forget(self, source: str) -> None:
        """Drop what is kept about that source."""
        for key in [key for key in self._known if key[0] == source]:
            del self._known[key]

    def close(self) -> None:
        """Drop what is kept about all sources. May be called twice."""
        self._known.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _remember(self, offer: Offer) -> None:
        key = (offer.source, offer.layout)
        if key not in self._known:
            self.requests += 1
            self._known[key] = None
        while len(self._known) > _SOURCES_KEPT:
            del self._known[next(iter(self._known))]

    def _bind_record(
        self, directory: Path, record: OfferRecord, offer: Offer, target: Layout, shadow: Sequence[Memory]
    ) -> SnapshotReading:
        def check() -> None:
            found = generation_of(directory, record.arenas)
            if found != offer.generation:
                raise _changed(offer, found)

        with OpenSnapshot(directory / record.snapshot) as snapshot:
            return self._reading(snapshot, target, shadow, check)

    def _bind_snapshot(
        self, directory: Path, offer: Offer, target: Layout, shadow: Sequence[Memory]
    ) -> SnapshotReading:
        """One snapshot of a store: it stays locked against pruning as long as the Reading lives, which holds it."""
        snapshot = OpenSnapshot(directory)

        def check() -> None:
            found = generation_of_snapshot(snapshot)
            if found != offer.generation or snapshot.commit.snapshot != offer.layout:
                raise _changed(offer, found)
            snapshot.check()

        return self._reading(snapshot, target, shadow, check)

    def _reading(
        self, snapshot: OpenSnapshot, target: Layout, shadow: Sequence[Memory], check: Callable[[], None]
    ) -> SnapshotReading:
        return SnapshotReading(
            snapshot.contents(),
            target,
            shadow,
            kernels=self._kernels,
            device=self._device,
            plans=self._plans,
            check=check,
        )


def _changed(offer: Offer, found: int) -> OfferChanged:
    return OfferChanged(
        f"{offer.source} changed its files: generation {found}, offered was {offer.generation}"
    )
