"""The draft of a snapshot: a snapshot that is being written, its directory, its lock, and the commit that makes it exist.

Owns the lock while the snapshot is written. Ranks write into the directory (writer.py); the leader, which began the draft, reads their
manifests back, combines their regions into full tensors, and writes the commit file last.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from liveweight.errors import DigestMismatch, LayoutInvalid, SnapshotDamaged
from liveweight.spec.digest import Lanes, combine, from_hex, to_hex
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.spec.region import Region, check_tiling
from liveweight.transports.snapshot.disk.atomic_files import read_small, sync_directory, write_whole
from liveweight.transports.snapshot.disk.format import (
    CommitFile,
    RankEntry,
    RankManifest,
    block_sum,
    decode_manifest,
    encode_commit,
)
from liveweight.transports.snapshot.disk.names import COMMIT, WRITING, is_manifest, manifest_name


class SnapshotDraft:
    """A snapshot that is being written: ranks write into `path`, under the id `snapshot`; the leader commits. Ends with the `with`.

    Left without a commit, whatever was written is removed.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self.snapshot = secrets.token_hex(16)
        self._committed = False

    def commit(
        self,
        version: Version,
        *,
        ranks: int,
        expected: Manifest | None = None,
        durable: bool = True,
    ) -> CommitFile:
        """Make it exist, once every rank's manifest is there. Called by the leader, when all ranks have reported that they are done.

        Digests of the ranks' regions become those of full tensors; copies that disagree, or tensors that differ from `expected`,
        are refused by name (DigestMismatch), and so are regions that do not cover their tensor. A version without a digest gets the
        content's, where digests were made.
        """
        manifests = self._manifests(ranks)
        manifest = _whole(manifests)
        _compare(manifest, expected)
        if version.digest is None:
            version = msgspec.structs.replace(version, digest=manifest.digest())
        commit = CommitFile(
            snapshot=self.snapshot,
            version=version,
            created_s=time.time(),
            manifest=manifest,
            ranks=tuple(entry for entry, _ in manifests),
            weights_bytes=manifest.size_bytes,
        )
        if durable:
            sync_directory(
                self.path
            )  # the ranks synced their files; that they are called so must last before the commit file does
        write_whole(self.path / COMMIT, encode_commit(commit), durable=durable)
        self._committed = True  # from here on others may read it, even if the machine should forget it
        if durable:
            sync_directory(self.path)
            sync_directory(self.path.parent)
        with suppress(OSError):
            (self.path / WRITING).unlink()
        return commit

    def close(self) -> None:
        """Release the lock; without a commit, remove the directory first. May be called twice."""
        if self._lock < 0:
            return
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _manifests(self, ranks: int) -> list[tuple[RankEntry, RankManifest]]:
        names = sorted(path.name for path in self.path.iterdir() if is_manifest(path.name))
        found = [self._entry(name) for name in names]
        numbers = sorted(manifest.rank for _, manifest in found)
        if numbers != list(range(ranks)):
            raise SnapshotDamaged(str(self.path), [f"manifests of ranks {numbers}, wanted {ranks} of them"])
        return sorted(found, key=lambda entry: entry[1].rank)

    def _entry(self, name: str) -> tuple[RankEntry, RankManifest]:
        data = read_small(self.path / name)
        manifest = decode_manifest(data, str(self.path / name))
        if manifest.snapshot != self.snapshot or manifest_name(manifest.rank, manifest.device_id) != name:
            raise SnapshotDamaged(str(self.path), [f"{name} stale: of snapshot {manifest.snapshot}"])
        entry = RankEntry(
            file=name,
            rank=manifest.rank,
            device_id=manifest.device_id,
            size_bytes=len(data),
            sum=block_sum(data),
        )
        return entry, manifest


def _whole(manifests: Sequence[tuple[RankEntry, RankManifest]]) -> Manifest:
    """The full tensors of all ranks, with digests where every region has one."""
    specs: dict[str, TensorSpec] = {}
    regions: dict[str, list[tuple[Region, Lanes | None]]] = defaultdict(list)
    for _, manifest in manifests:
        for spec in manifest.tensors:
            known = specs.setdefault(spec.name, spec)
            if (known.dtype, known.shape, known.aliases) != (spec.dtype, spec.shape, spec.aliases):
                raise LayoutInvalid(f"{spec.name}: ranks disagree, {known.describe()} and {spec.describe()}")
        for piece in (piece for part in manifest.parts for piece in part.pieces):
            lanes = None if piece.digest is None else from_hex(piece.digest)
            regions[piece.name].append((piece.region, lanes))
    tensors, torn = [], []
    for name, spec in specs.items():
        check_tiling(name, [region for region, _ in regions[name]], spec.shape)
        known_lanes = [(region, lanes) for region, lanes in regions[name] if lanes is not None]
        if len(known_lanes) < len(regions[name]):
            tensors.append(spec)
            continue
        total = combine(known_lanes)
        if total is None:
            torn.append(name)
        else:
            tensors.append(msgspec.structs.replace(spec, digest=to_hex(total)))
    if torn:
        raise DigestMismatch(torn, "copies of one region on several ranks")
    return Manifest(tensors=tuple(tensors))


def _compare(manifest: Manifest, expected: Manifest | None) -> None:
    if expected is None:
        return
    known = manifest.by_name()
    differing = [
        spec.name
        for spec in expected
        if spec.digest is not None and spec.name in known and known[spec.name].digest != spec.digest
    ]
    if differing:
        raise DigestMismatch(differing, "what was written")
