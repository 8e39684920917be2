"""Export: a snapshot of any layout as an ordinary HF checkpoint directory.

Full tensors are put together shard by shard, compared with the snapshot's digests, and written; one shard is held in memory. The
directory is there whole or not at all.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.cpu import allocate
from liveweight.devices.kernels import Kernels, choose
from liveweight.devices.memory import Memory
from liveweight.errors import DigestMismatch, Refused
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import to_hex
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import whole
from liveweight.transports.snapshot.block_reads import SnapshotReading
from liveweight.transports.snapshot.disk.atomic_files import (
    TEMPORARY,
    out_of_space,
    sync_directory,
    write_all,
    written,
)
from liveweight.transports.snapshot.disk.open_snapshot import Contents, OpenSnapshot
from liveweight.transports.snapshot.disk.parts import PartPiece, header
from liveweight.transports.snapshot.disk.writer import Progress

SHARD_BYTES = 1 << 30
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedCheckpoint:
    """A checkpoint directory: its weights' files, and whether they were compared with digests."""

    directory: Path
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    verified: bool


def export(
    snapshot: OpenSnapshot,
    directory: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    like: Path | None = None,
    progress: Progress = lambda _: None,
) -> ExportedCheckpoint:
    """Write `directory`, which must not be there. `like` is a model directory whose other files (config, tokenizer) are copied.

    DigestMismatch, SnapshotDamaged or OutOfSpace leave no directory.
    """
    if directory.exists():
        raise Refused(f"{directory} is there already; export writes a new directory")
    if like is not None and not like.is_dir():
        raise Refused(f"{like} is not a directory")
    temporary = directory.with_name(f"{TEMPORARY}{secrets.token_hex(8)}-{directory.name}")
    try:
        temporary.mkdir(parents=True)
        if like is not None:
            _copy_others(like, temporary)
        exported = _write(snapshot, temporary, shard_bytes, progress)
        sync_directory(temporary)
        temporary.rename(directory)
        sync_directory(directory.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise out_of_space(directory, error) from error
        raise
    files, size_bytes, verified = exported
    tensors = len(snapshot.commit.manifest.tensors)
    return ExportedCheckpoint(
        directory=directory, files=files, tensors=tensors, size_bytes=size_bytes, verified=verified
    )


def _copy_others(like: Path, directory: Path) -> None:
    for path in like.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy2(path, directory / path.name)


def _write(
    snapshot: OpenSnapshot, directory: Path, shard_bytes: int, progress: Progress
) -> tuple[tuple[str, ...], int, bool]:
    contents, kernels = snapshot.contents(), choose().kernels
    shards = _shards(snapshot.commit.manifest.tensors, shard_bytes)
    names = _names(len(shards))
    weight_map: dict[str, str] = {}
    for name, specs in zip(names, shards, strict=True):
        _shard(directory / name, contents, specs, kernels, progress)
        weight_map |= {spec.name: name for spec in specs}
    size = snapshot.commit.manifest.size_bytes
    if len(names) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    verified = all(spec.digest is not None for spec in snapshot.commit.manifest)
    return names, size, verified


def _shards(tensors: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in tensors:
        if not shards or spec.size_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.size_bytes
    return [sorted(shard, key=lambda spec: -spec.dtype.size_bytes) for shard in shards]


def _names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _shard(
    path: Path, contents: Contents, specs: Sequence[TensorSpec], kernels: Kernels, progress: Progress
) -> None:
    layout = packed(specs, alignment_bytes=1)
    with allocate(layout.memories_bytes[0], "a shard") as allocation:
        memory = allocation.memory
        reading = SnapshotReading(contents, layout, [memory], kernels=kernels)
        reading.read(0, len(reading.rows))
        _compare(layout, memory, specs, kernels)
        pieces = [PartPiece(key=spec.name, spec=spec, region=whole(spec.shape)) for spec in specs]
        with written(path, durable=True) as descriptor:
            write_all(descriptor, memoryview(header(pieces, {"format": "pt"})))
            write_all(descriptor, memory.bytes().data)
    progress(layout.memories_bytes[0])


def _compare(layout: Layout, memory: Memory, specs: Sequence[TensorSpec], kernels: Kernels) -> None:
    plan = plan_digests(layout)
    lanes = kernels.bind_digest(plan.rows, [memory], plan.slots).run(0, len(plan.rows))
    digests = (to_hex(row) for row in lanes)
    differing = [
        spec.name for spec, digest in zip(specs, digests, strict=True) if spec.digest not in (None, digest)
    ]
    if differing:
        raise DigestMismatch(differing, "what was read of the snapshot")
