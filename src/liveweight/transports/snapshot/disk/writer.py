"""Writing one rank's weights: part after part, window after window, each copied, digested, summed and written while it is warm.

Owns one window of memory and one open file. The image says what is written; the commit that makes a snapshot of all ranks is in draft.py.
Called from a background thread: copying, summing and writing release the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import BoundCopy, BoundDigest, choose
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid
from liveweight.plan.copies import plan_copies
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import SEEDS, Lanes, to_hex
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.snapshot.disk.atomic_files import (
    FileSync,
    begin_writing,
    reserve,
    write_all,
    write_whole,
    written,
)
from liveweight.transports.snapshot.disk.block_buffer import block_memory
from liveweight.transports.snapshot.disk.format import (
    BLOCK_BYTES,
    METADATA_SNAPSHOT,
    PartFile,
    RankManifest,
    StoredRegion,
    block_sum,
    encode_manifest,
)
from liveweight.transports.snapshot.disk.names import manifest_name, part_name
from liveweight.transports.snapshot.disk.parts import (
    PART_BYTES,
    PartBlock,
    PartPiece,
    header,
    plan_parts,
    plan_windows,
    windows_layout,
)

_ITEM_BYTES_MAX = 8

Stop: TypeAlias = Callable[[], bool]
"""Whether to stop writing. Called between windows, in the writing thread."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were just written, in the writing thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Weights to be written: where they lie, and on which device.

    `check` raises where the memory is no longer what it was when the image was taken. It is called after the last byte of every part
    was read: what was read before and passes is of one version. The memory must stay allocated meanwhile.
    """

    layout: Layout
    memories: Sequence[Memory]
    device: Device = CPU
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """`part_bytes`: how large parts become. Not `durable`: nothing is synced, for files that need not survive the machine."""

    part_bytes: int = PART_BYTES
    block_bytes: int = BLOCK_BYTES
    digest: bool = True
    durable: bool = True

    def __post_init__(self) -> None:
        if self.part_bytes < 1 or self.block_bytes < _ITEM_BYTES_MAX:
            raise ValueError(f"parts of {self.part_bytes} bytes in blocks of {self.block_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingCancelled:
    """The caller's `stop` ended the work; nothing of it is a snapshot."""

    written_bytes: int


class RankWriter:
    """Writes one rank of a snapshot that was begun. Used by one thread, once."""

    def __init__(
        self,
        directory: Path,
        image: Image,
        *,
        snapshot: str,
        rank: int,
        device_id: int | None = None,
        settings: WriteSettings | None = None,
        stop: Stop = lambda: False,
        progress: Progress = lambda _: None,
    ) -> None:
        if rank < 0 or (device_id is not None and device_id < 0):
            raise LayoutInvalid(f"rank {rank} with device id {device_id}")
        self._directory, self._image, self._snapshot = directory, image, snapshot
        self._rank, self._device_id = rank, rank if device_id is None else device_id
        self._settings, self._stop, self._progress = settings or WriteSettings(), stop, progress
        self._buffer = block_memory(image.device, self._settings.block_bytes)
        self._bytes = self._buffer.bytes().data
        self._mover, self._kernels = image.device.to_host(), choose().kernels
        self._done_bytes = 0

    def write(self) -> RankManifest | WritingCancelled:
        """All parts, then the manifest. OutOfSpace, or what the image's check raises, leaves files that are no snapshot."""
        parts: list[PartFile] = []
        with FileSync() as sync:
            for number, pieces in enumerate(plan_parts(self._image.layout, self._settings.part_bytes)):
                part = self._part(number, pieces, sync)
                if part is None:
                    return WritingCancelled(written_bytes=self._done_bytes)
                parts.append(part)
        manifest = RankManifest(
            snapshot=self._snapshot,
            rank=self._rank,
            device_id=self._device_id,
            block_bytes=self._settings.block_bytes,
            tensors=self._image.layout.manifest().without_digests().tensors,
            parts=tuple(parts),
        )
        path = self._directory / manifest_name(self._rank, self._device_id)
        write_whole(path, encode_manifest(manifest), durable=self._settings.durable)
        return manifest

    def _part(self, number: int, pieces: Sequence[PartPiece], sync: FileSync) -> PartFile | None:
        path = self._directory / part_name(self._rank, self._device_id, number)
        head = header(pieces, self._metadata(number))
        planned = plan_windows(pieces, self._settings.block_bytes)
        sums: list[str] = []
        size = len(head) + sum(piece.size_bytes for piece in pieces)
        try:
            with written(path, durable=self._settings.durable, sync=sync) as descriptor:
                reserve(descriptor, size)
                write_all(descriptor, memoryview(head))
                lanes = self._windows(descriptor, pieces, planned, sums)
                self._image.check()
        except _Stop:
            return None
        stored = _stored(pieces, planned, sums, lanes, len(head))
        return PartFile(
            file=path.name, size_bytes=size, header_bytes=len(head), header_sum=block_sum(head), pieces=stored
        )

    def _metadata(self, number: int) -> dict[str, str]:
        return {
            "format": "pt",
            METADATA_SNAPSHOT: self._snapshot,
            "liveweight.rank": str(self._rank),
            "liveweight.part": str(number),
        }

    def _windows(
        self,
        descriptor: int,
        pieces: Sequence[PartPiece],
        planned: Sequence[PartBlock],
        sums: list[str],
    ) -> Lanes | None:
        """Write a part's windows; the sums of its blocks are added to `sums`, their digests returned."""
        layout = windows_layout(pieces, planned)
        windows = [self._buffer] * len(layout.memories_bytes)
        rows = plan_copies(self._image.layout, layout).rows
        copies = self._mover.bind_copy(rows, self._image.memories, windows)
        digests = plan_digests(layout)
        reading = self._kernels.bind_digest(digests.rows, windows, digests.slots)
        lanes = np.zeros((digests.slots, SEEDS), dtype=np.uint32) if self._settings.digest else None
        copied, read = _ranges(rows[:, 2], len(windows)), _ranges(digests.rows[:, 0], len(windows))
        for window, group in itertools.groupby(planned, key=lambda block: block.window):
            if self._stop():
                raise _Stop
            _fill(copies, copied[window], reading, read[window], lanes)
            size = layout.memories_bytes[window]
            sums += [block_sum(self._bytes[b.offset_bytes : b.offset_bytes + b.size_bytes]) for b in group]
            write_all(descriptor, self._bytes[:size])
            if self._settings.durable:
                begin_writing(descriptor, size)
            self._done_bytes += size
            self._progress(size)
        return lanes


class _Stop(Exception):
    """Raised inside a file that is being written, so that it is removed."""


def _fill(
    copies: BoundCopy,
    copied: tuple[int, int],
    reading: BoundDigest,
    read: tuple[int, int],
    lanes: Lanes | None,
) -> None:
    copies.run(*copied)
    if lanes is not None:
        lanes += reading.run(*read)


def _ranges(numbers: Table, count: int) -> list[tuple[int, int]]:
    """Where the rows of each memory begin and end; they come in its order."""
    edges = np.searchsorted(numbers, np.arange(count + 1)).tolist()
    return list(itertools.pairwise(edges))


def _stored(
    pieces: Sequence[PartPiece],
    planned: Sequence[PartBlock],
    sums: Sequence[str],
    lanes: Lanes | None,
    offset_bytes: int,
) -> tuple[StoredRegion, ...]:
    of_piece: list[list[int]] = [[] for _ in pieces]
    for number, block in enumerate(planned):
        of_piece[block.piece].append(number)
    stored = []
    for piece, numbers in zip(pieces, of_piece, strict=True):
        digest = None if lanes is None else to_hex(lanes[numbers].sum(axis=0, dtype=np.uint32))
        stored.append(
            StoredRegion(
                key=piece.key,
                name=piece.spec.name,
                region=piece.region,
                offset_bytes=offset_bytes,
                size_bytes=piece.size_bytes,
                sums=tuple(sums[number] for number in numbers),
                digest=digest,
            )
        )
        offset_bytes += piece.size_bytes
    return tuple(stored)
