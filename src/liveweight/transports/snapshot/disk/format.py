"""The format of a snapshot: a manifest per rank, and the commit file that makes the snapshot exist. Pure.

Regions are in coordinates of the full tensor, so that ranks of any other layout can find what they need. Every block of a part, its header
and the manifest have an xxh3; the commit file has its own. So any other file in the place of one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import xxhash

from liveweight.errors import LiveWeightError, SnapshotDamaged
from liveweight.spec.decoders import from_json
from liveweight.spec.manifest import Manifest, TensorSpec, Version
from liveweight.spec.region import Region, Span, canonical, count

FORMAT = 1
BLOCK_BYTES = 4 << 20
"""What is read, checked and copied at a time."""
METADATA_SNAPSHOT = "liveweight.snapshot"
"""Where a part's header says which snapshot it belongs to."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class StoredRegion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A region of tensor `name`, row-major under `key` in its part. `sums` are its blocks' xxh3, `digest` its share of the tensor's."""

    key: str
    name: str
    region: Region
    offset_bytes: int
    size_bytes: int
    sums: tuple[str, ...]
    digest: str | None = None


class PartFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file, whole: its size, its header's size and xxh3, and what lies behind it."""

    file: str
    size_bytes: int
    header_bytes: int
    header_sum: str
    pieces: tuple[StoredRegion, ...]


class RankManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank wrote. `tensors` are the full ones that its pieces are cut from."""

    snapshot: str
    rank: int
    device_id: int
    block_bytes: int
    tensors: tuple[TensorSpec, ...]
    parts: tuple[PartFile, ...]
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts, headers included."""
        return sum(part.size_bytes for part in self.parts)


class RankEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's manifest, as the commit file knows it."""

    file: str
    rank: int
    device_id: int
    size_bytes: int
    sum: str


class CommitFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a snapshot exist: its id, its version, the full tensors with their digests where they are known, and every rank."""

    snapshot: str
    version: Version
    created_s: float
    manifest: Manifest
    ranks: tuple[RankEntry, ...]
    weights_bytes: int
    format: int = FORMAT


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    xxh3: str
    commit: msgspec.Raw


def block_sum(data: object) -> str:
    """The xxh3 of a block, a header or a manifest."""
    return xxhash.xxh3_64_hexdigest(data)  # type: ignore[arg-type]


def encode_commit(commit: CommitFile) -> bytes:
    """As it stands in its file, with its own xxh3."""
    body = msgspec.json.encode(commit)
    sealed = _Sealed(xxh3=block_sum(body), commit=msgspec.Raw(body))
    return msgspec.json.encode(sealed)


def decode_commit(data: bytes, where: str) -> CommitFile:
    """What `encode_commit` wrote; SnapshotDamaged, with the place, for anything else."""
    sealed = _decoded(data, _Sealed, where)
    if block_sum(bytes(sealed.commit)) != sealed.xxh3:
        raise SnapshotDamaged(where, ["corrupted: its xxh3 is not its content's"])
    return _current(_decoded(bytes(sealed.commit), CommitFile, where), where)


def encode_manifest(manifest: RankManifest) -> bytes:
    """As it stands in its file."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, where: str) -> RankManifest:
    """What `encode_manifest` wrote; SnapshotDamaged, with the place, for anything else."""
    return _current(_decoded(data, RankManifest, where), where)


def _current(read: _Struct, where: str) -> _Struct:
    number = getattr(read, "format", FORMAT)
    if number != FORMAT:
        raise SnapshotDamaged(where, [f"of format {number}, this release reads {FORMAT}"])
    return read


def _decoded(data: bytes, kind: type[_Struct], where: str) -> _Struct:
    try:
        return from_json(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LiveWeightError) as error:
        raise SnapshotDamaged(where, [f"corrupted: {error}"]) from error


def blocks(region: Region, item_bytes: int, block_bytes: int) -> list[Region]:
    """The region in boxes of at most that many bytes, each of them one run of its row-major storage, in that order."""
    return list(_cut(region, item_bytes, max(block_bytes, item_bytes))) if count(region) else []


def _cut(region: Region, item_bytes: int, block_bytes: int) -> Iterator[Region]:
    size = count(region) * item_bytes
    if size <= block_bytes:
        yield canonical(region)
        return
    first, inner = region[0], region[1:]
    line_bytes = size // first.count
    step = max(1, block_bytes // line_bytes)
    for index in range(0, first.count, step):
        lines = Span(first.start + index * first.step, min(step, first.count - index), first.step)
        if line_bytes <= block_bytes:
            yield canonical((lines, *inner))
        else:
            yield from (canonical((lines, *box)) for box in _cut(inner, item_bytes, block_bytes))


def sizes_bytes(regions: Sequence[Region], item_bytes: int) -> list[int]:
    """How many bytes each of them has."""
    return [count(region) * item_bytes for region in regions]
