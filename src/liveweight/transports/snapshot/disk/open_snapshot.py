"""An open snapshot: its commit file, locked against pruning, and every rank's manifest.

Opening checks everything but the weights themselves: all files must be there, in their sizes, and no others. The weights are checked block
by block, when they are read (snapshot/block_reads).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from liveweight.errors import SnapshotDamaged, SnapshotNotFound
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region
from liveweight.transports.snapshot.disk.atomic_files import open_locked, read_small
from liveweight.transports.snapshot.disk.format import (
    CommitFile,
    PartFile,
    RankManifest,
    block_sum,
    blocks,
    decode_commit,
    decode_manifest,
    sizes_bytes,
)
from liveweight.transports.snapshot.disk.names import COMMIT, belongs
from liveweight.transports.snapshot.disk.parts import block_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBlock:
    """A run of bytes of a file, and the region that it is. `sum` is None if no manifest has it."""

    file: int
    offset_bytes: int
    size_bytes: int
    sum: str | None
    spec: TensorSpec
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """A file that holds blocks, and its header's size and xxh3, if a manifest has them."""

    path: Path
    size_bytes: int
    header_bytes: int = 0
    header_sum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What files hold, in one order for all of them. `snapshot` is the id that their headers name, where one is known."""

    where: str
    tensors: tuple[TensorSpec, ...]
    files: tuple[FileFacts, ...]
    blocks: tuple[FileBlock, ...]
    snapshot: str | None

    def layout(self) -> Layout:
        """The blocks as memories of their own: memory i is block i, whole."""
        return Layout(
            tensors=self.tensors,
            memories_bytes=tuple(block.size_bytes for block in self.blocks),
            placements=tuple(
                block_placement(block.spec, block.region, memory=number)
                for number, block in enumerate(self.blocks)
            ),
        )


class OpenSnapshot:
    """One complete snapshot. As long as it is open, no pruner removes it. Any thread."""

    def __init__(self, path: Path) -> None:
        """SnapshotNotFound where none is, or is complete; SnapshotDamaged names every file that is not as it was written."""
        self.path = path
        self._lock = lock = _locked(path)
        # Without `close`, the last reference releases the lock. Not at exit: the kernel closes the descriptors.
        self._release = weakref.finalize(self, os.close, lock)
        self._release.atexit = False
        try:
            data = os.pread(lock, os.fstat(lock).st_size, 0)
            self.commit: CommitFile = decode_commit(data, str(path / COMMIT))
            self.manifests: tuple[RankManifest, ...] = _manifests(path, self.commit)
            _check_files(path, self.commit, self.manifests)
        except BaseException:
            self.close()
            raise

    def contents(self) -> Contents:
        """Everything that it holds, rank after rank, part after part."""
        specs = self.commit.manifest.without_digests().by_name()
        files: list[FileFacts] = []
        found: list[FileBlock] = []
        for manifest in self.manifests:
            for part in manifest.parts:
                found += _part_blocks(part, len(files), manifest.block_bytes, specs, str(self.path))
                files.append(
                    FileFacts(
                        path=self.path / part.file,
                        size_bytes=part.size_bytes,
                        header_bytes=part.header_bytes,
                        header_sum=part.header_sum,
                    )
                )
        return Contents(
            where=str(self.path),
            tensors=self.commit.manifest.without_digests().tensors,
            files=tuple(files),
            blocks=tuple(found),
            snapshot=self.commit.snapshot,
        )

    def check(self) -> None:
        """Raise SnapshotDamaged if it was removed or replaced since, in spite of the lock."""
        try:
            found = os.stat(self.path / COMMIT).st_ino  # noqa: PTH116 - beside fstat
        except OSError:
            found = None
        if found != os.fstat(self._lock).st_ino:
            raise SnapshotDamaged(str(self.path), [f"{COMMIT} missing: the snapshot was removed"])

    def close(self) -> None:
        """Release the lock against pruning. May be called twice."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locked(path: Path) -> int:
    try:
        lock = open_locked(path / COMMIT, exclusive=False)
    except OSError as error:
        what = f"no complete snapshot: no {COMMIT} ({error.strerror})"
        raise SnapshotNotFound(what, [str(path)]) from error
    if lock is None:
        raise SnapshotNotFound("the snapshot is being removed", [str(path)])
    return lock


def _manifests(path: Path, commit: CommitFile) -> tuple[RankManifest, ...]:
    manifests, problems = [], []
    for entry in commit.ranks:
        try:
            data = read_small(path / entry.file)
            if len(data) != entry.size_bytes or block_sum(data) != entry.sum:
                kind = "truncated" if len(data) < entry.size_bytes else "corrupted"
                problems.append(_other(entry.file, data, commit.snapshot, kind))
                continue
            manifests.append(decode_manifest(data, str(path / entry.file)))
        except SnapshotDamaged as error:
            problems += error.problems
    if problems:
        raise SnapshotDamaged(str(path), problems)
    return tuple(manifests)


def _other(file: str, data: bytes, snapshot: str, otherwise: str) -> str:
    """How a manifest that is not the one that was committed differs."""
    try:
        found = decode_manifest(data, file).snapshot
    except SnapshotDamaged:
        return f"{file} {otherwise}"
    return f"{file} {otherwise}" if found == snapshot else f"{file} stale: of snapshot {found}"


def _check_files(path: Path, commit: CommitFile, manifests: tuple[RankManifest, ...]) -> None:
    listed = {part.file: part.size_bytes for manifest in manifests for part in manifest.parts}
    try:
        there = {entry.name: entry.stat().st_size for entry in path.iterdir() if entry.is_file()}
    except OSError as error:
        raise SnapshotDamaged(str(path), ["missing: removed while it was opened"]) from error
    problems = [f"{name} missing" for name in listed if name not in there]
    for name, size in listed.items():
        found = there.get(name, size)
        if found != size:
            kind = "truncated" if found < size else "corrupted"
            problems.append(f"{name} {kind}: {found} bytes, written were {size}")
    known = {*listed, *(entry.file for entry in commit.ranks)}
    problems += [f"{name} extra" for name in sorted(there) if belongs(name) and name not in known]
    if problems:
        raise SnapshotDamaged(str(path), problems)


def _part_blocks(
    part: PartFile, file: int, block_bytes: int, specs: Mapping[str, TensorSpec], where: str
) -> list[FileBlock]:
    found = []
    for piece in part.pieces:
        spec, offset = specs[piece.name], piece.offset_bytes
        regions = blocks(piece.region, spec.dtype.size_bytes, block_bytes)
        if len(regions) != len(piece.sums):
            raise SnapshotDamaged(where, [f"{part.file}: {piece.key} has {len(piece.sums)} checksums"])
        sizes = sizes_bytes(regions, spec.dtype.size_bytes)
        for region, size, checksum in zip(regions, sizes, piece.sums, strict=True):
            found.append(
                FileBlock(
                    file=file, offset_bytes=offset, size_bytes=size, sum=checksum, spec=spec, region=region
                )
            )
            offset += size
    return found
