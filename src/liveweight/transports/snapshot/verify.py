"""Verifying a whole snapshot: every header, every block, and the digest of every region.

Reading a part of a snapshot checks only that part; this checks all of it, before somebody needs it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from liveweight.devices.device import CPU
from liveweight.devices.kernels import BoundDigest, choose
from liveweight.errors import SnapshotDamaged
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import SEEDS, to_hex
from liveweight.spec.row_table import Table
from liveweight.transports.snapshot.block_reads import OpenFiles
from liveweight.transports.snapshot.disk.atomic_files import read_all
from liveweight.transports.snapshot.disk.block_buffer import block_memory
from liveweight.transports.snapshot.disk.format import RankManifest, StoredRegion, block_sum
from liveweight.transports.snapshot.disk.open_snapshot import Contents, FileBlock, OpenSnapshot
from liveweight.transports.snapshot.disk.writer import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVerified:
    """Everything is as it was written. `regions` is how many have a digest, which was taken anew."""

    files: int
    blocks: int
    regions: int
    size_bytes: int


def verify(snapshot: OpenSnapshot, progress: Progress = lambda _: None) -> SnapshotVerified:
    """Read everything. SnapshotDamaged names every file that is not what was written, and every tensor that is not."""
    contents = snapshot.contents()
    files = OpenFiles(contents, range(len(contents.files)))
    memory = block_memory(CPU, max((block.size_bytes for block in contents.blocks), default=0))
    plan = plan_digests(contents.layout())
    digests = choose().kernels.bind_digest(plan.rows, [memory] * len(contents.blocks), plan.slots)
    edges = np.searchsorted(plan.rows[:, 0], np.arange(len(contents.blocks) + 1))
    problems: dict[str, None] = {}
    window, number, regions = memory.bytes().data, 0, 0
    for piece in _pieces(snapshot.manifests):
        total = np.zeros(SEEDS, dtype=np.uint32)
        for _ in piece.sums:
            block = contents.blocks[number]
            problem = _problem(contents, files.descriptor(block.file), block, window)
            if problem is not None:
                problems[problem] = None
            elif piece.digest is not None:
                total += _digest(digests, edges, number)
            progress(block.size_bytes)
            number += 1
        if piece.digest is not None:
            regions += 1
            if not problems and to_hex(total) != piece.digest:
                problems[f"{piece.name}: content differs from its digest"] = None
    if problems:
        raise SnapshotDamaged(str(snapshot.path), list(problems))
    size = sum(os.fstat(files.descriptor(n)).st_size for n in range(len(contents.files)))
    return SnapshotVerified(files=len(contents.files), blocks=number, regions=regions, size_bytes=size)


def _pieces(manifests: tuple[RankManifest, ...]) -> Iterator[StoredRegion]:
    for manifest in manifests:
        for part in manifest.parts:
            yield from part.pieces


def _problem(contents: Contents, descriptor: int, block: FileBlock, window: memoryview) -> str | None:
    into, name = window[: block.size_bytes], contents.files[block.file].path.name
    if read_all(descriptor, into, block.offset_bytes) < block.size_bytes:
        return f"{name} truncated"
    if block_sum(into) != block.sum:
        return f"{name} corrupted: {block.spec.name}"
    return None


def _digest(digests: BoundDigest, edges: Table, number: int) -> Table:
    lanes: Table = digests.run(int(edges[number]), int(edges[number + 1]))[number]
    return lanes
