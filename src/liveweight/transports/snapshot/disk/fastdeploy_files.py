"""Files without a manifest of ours, such as FastDeploy's own: which ones a rank reads, and what they hold.

Follows FastDeploy's four places, the first that has files wins. What they hold cannot be compared with anything, so whatever leaves
open which rank's they are, or whether they are all, is refused. Pickled files are never read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, cast

from safetensors import SafetensorError, safe_open

from liveweight.errors import ManifestMismatch, SnapshotNotFound, SnapshotRefused
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, canonical, counts, show
from liveweight.transports.snapshot.disk.format import BLOCK_BYTES, blocks, sizes_bytes
from liveweight.transports.snapshot.disk.names import (
    COMMIT,
    is_manifest,
    legacy_name,
    part_number,
    part_of,
    single_name,
    single_of,
)
from liveweight.transports.snapshot.disk.open_snapshot import Contents, FileBlock, FileFacts

SHARED_DIRECTORY = Path("/shared_ipc_meta")
"""The last of FastDeploy's four places."""

Level: TypeAlias = Literal["parts", "single", "legacy", "shared"]
"""Which of the four places had files: numbered parts, one file, one file under its old name, one in the shared directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """A rank's files in their order, the place that had them, and files of later places that were passed over."""

    level: Level
    files: tuple[Path, ...]
    passed_over: tuple[Path, ...]


class _File(Protocol):
    def offset_keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


def find(directory: Path, *, rank: int, device_id: int, shared: Path | None = SHARED_DIRECTORY) -> FoundFiles:
    """The files of that rank: parts, one file, its old name, the shared directory, in this order.

    SnapshotNotFound names every place; SnapshotRefused, what is wrong with the files of the first place that has some.
    """
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    if any(is_manifest(name) for name in names):
        raise SnapshotNotFound(f"a snapshot that is not complete: no {COMMIT}", [str(directory)])
    places: list[tuple[Level, Sequence[Path]]] = [
        ("parts", [directory / name for name in _parts(names, rank, device_id)]),
        ("single", _existing(directory / single_name(rank, device_id))),
        ("legacy", _existing(directory / legacy_name(device_id))),
        ("shared", () if shared is None else _existing(shared / single_name(rank, device_id))),
    ]
    hits = [(level, tuple(files)) for level, files in places if files]
    if not hits:
        raise SnapshotNotFound(
            f"no snapshot of rank {rank} with device id {device_id}",
            _searched_places(directory, rank, device_id, shared, names),
        )
    (level, files), later = hits[0], hits[1:]
    if level == "legacy" and rank != 0:
        raise SnapshotRefused(f"{files[0]} is rank 0's by its name, and this is rank {rank}")
    passed = tuple(path for _, paths in later for path in paths)
    return FoundFiles(level=level, files=files, passed_over=passed)


def _existing(path: Path) -> tuple[Path, ...]:
    return (path,) if path.is_file() else ()


def _parts(names: Sequence[str], rank: int, device_id: int) -> list[str]:
    """The rank's parts by their numbers, which must be all from the first on."""
    numbered: dict[int, str] = {}
    for name in names:
        owner, written = part_of(name) or (None, "")
        if owner != (rank, device_id):
            continue
        number = part_number(written)
        if number is None:
            raise SnapshotRefused(f"{name}: {written!r} is no part's number")
        numbered[number] = name
    numbers = sorted(numbered)
    gaps = sorted(set(range(numbers[0], numbers[-1])) - set(numbers)) if numbers else []
    if gaps or (numbers and numbers[0] > 1):
        missing = gaps or list(range(numbers[0]))
        raise SnapshotRefused(
            f"parts {', '.join(map(str, missing))} of rank {rank} are missing, {numbers[-1]} is there"
        )
    return [numbered[number] for number in numbers]


def _searched_places(
    directory: Path, rank: int, device_id: int, shared: Path | None, names: Sequence[str]
) -> list[str]:
    places = [
        str(directory / f"model_state.tp{rank}.{device_id}.part*.pdparams"),
        str(directory / single_name(rank, device_id)),
        str(directory / legacy_name(device_id)),
        *([] if shared is None else [str(shared / single_name(rank, device_id))]),
    ]
    owners = {(part_of(name) or (None, ""))[0] or single_of(name) for name in names} - {None}
    others = [f"rank {owner[0]} with id {owner[1]}" for owner in sorted(o for o in owners if o is not None)]
    return places + ([f"(which has {', '.join(others)})"] if others else [])


def contents_of(found: FoundFiles, target: Layout, *, block_bytes: int = BLOCK_BYTES) -> Contents:
    """What the files hold of a rank's target: each tensor under its name, in the shape of the rank's own region of it.

    SnapshotRefused for a tensor of another shape, which is another rank's or layout's; ManifestMismatch names what is missing and
    what is not expected.
    """
    owned = _owned(target)
    files: list[FileFacts] = []
    found_blocks: list[FileBlock] = []
    seen: dict[str, Path] = {}
    unexpected: list[str] = []
    for number, path in enumerate(found.files):
        for key, dtype, shape, offset in _entries(path):
            if key in seen:
                raise SnapshotRefused(f"{key} is in {seen[key].name} and in {path.name}")
            seen[key] = path
            if key not in owned:
                unexpected.append(f"{key} unexpected")
                continue
            spec, region = owned[key]
            _check_shard(path, spec, region, dtype, shape)
            found_blocks += _blocks(number, offset, spec, region, block_bytes)
        files.append(FileFacts(path=path, size_bytes=path.stat().st_size))
    wanted = {spec.name: spec for spec, _ in owned.values()}
    missing = [f"{name} missing" for name, spec in wanted.items() if seen.keys().isdisjoint(spec.names)]
    if missing or unexpected:
        raise ManifestMismatch([*missing, *unexpected])
    return Contents(
        where=str(found.files[0].parent),
        tensors=target.manifest().without_digests().tensors,
        files=tuple(files),
        blocks=tuple(found_blocks),
        snapshot=None,
    )


def _owned(target: Layout) -> dict[str, tuple[TensorSpec, Region]]:
    """What the rank owns of every tensor, by all of its names; one region, or the name alone would not say which is meant."""
    owned: dict[str, tuple[TensorSpec, Region]] = {}
    specs = target.specs()
    for placement in target.placements:
        spec, region = specs[placement.name], canonical(placement.region)
        if owned.setdefault(spec.name, (spec, region))[1] != region:
            raise SnapshotRefused(f"{spec.name}: this rank owns several regions of it, files name only one")
    return {name: owned[spec.name] for name, spec in specs.items() if spec.name in owned}


def _check_shard(path: Path, spec: TensorSpec, region: Region, dtype: DType, shape: tuple[int, ...]) -> None:
    if (dtype, shape) != (spec.dtype, counts(region)):
        raise SnapshotRefused(
            f"{path.name}: {spec.name} is {dtype.value}{list(shape)}, and this rank owns "
            f"{show(region)} of {spec.describe()}: another rank's or another layout's shard"
        )


def _blocks(file: int, offset: int, spec: TensorSpec, region: Region, block_bytes: int) -> list[FileBlock]:
    regions = blocks(region, spec.dtype.size_bytes, block_bytes)
    sizes = sizes_bytes(regions, spec.dtype.size_bytes)
    starts = itertools.accumulate(sizes, initial=offset)
    return [
        FileBlock(file=file, offset_bytes=start, size_bytes=size, sum=None, spec=spec, region=box)
        for box, size, start in zip(regions, sizes, starts, strict=False)
    ]


def _entries(path: Path) -> list[tuple[str, DType, tuple[int, ...], int]]:
    """Name, dtype, shape and place of every tensor of a file. safetensors checks that they fill it without holes."""
    try:
        with safe_open(path, framework="np") as opened:
            file, entries = cast(_File, opened), []
            with path.open("rb") as raw:
                offset = 8 + int.from_bytes(raw.read(8), "little")
            for key in file.offset_keys():
                part = file.get_slice(key)
                dtype, shape = DType.from_safetensors(part.get_dtype()), tuple(part.get_shape())
                entries.append((key, dtype, shape, offset))
                offset += dtype.size_bytes * math.prod(shape)
            return entries
    except (SafetensorError, ValueError) as error:
        raise SnapshotRefused(
            f"{path.name} is no whole safetensors file ({error}); pickled files are not read"
        ) from error
    except OSError as error:
        raise SnapshotRefused(f"{path} cannot be read: {error}") from error
