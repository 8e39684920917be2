"""A source from an HF checkpoint directory: `model.safetensors`, or `model.safetensors.index.json` and its shards.

Every header is read, and every file's length compared with it, before a byte is offered; bytes are memory-mapped when asked for.
The files must not be rewritten in place while they are read: write a new directory, or rename, instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
from safetensors import SafetensorError, safe_open

from liveweight.errors import ManifestInvalid, MissingExtra
from liveweight.spec.decoders import from_json
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.tensor_names import clean_all

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    """The part of an index that says where tensors are. Its total_size is not compared: published ones are often wrong."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a file, under the name that it has there."""

    file: Path
    key: str
    dtype: DType
    shape: tuple[int, ...]


class _Part(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class CheckpointFile(Protocol):
    """What is used of an open file of safetensors, which has no types of its own."""

    def keys(self) -> list[str]:
        """The tensors' names."""

    def get_slice(self, name: str) -> _Part:
        """A tensor of which only what is indexed is read."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, mapped."""


class CheckpointSource:
    """The tensors of a checkpoint directory, shard by shard in the index's order, within a shard by name."""

    held = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: tuple[list[Entry], Manifest] | None = None

    def manifest(self) -> Manifest:
        """Reads the headers; ManifestInvalid names the file, and the tensor, where the directory contradicts itself."""
        return self._read_headers()[1]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Opens one file at a time; a tensor's bytes are read from the file as they are used."""
        entries, manifest = self._read or self._read_headers()
        names = (spec.name for spec in manifest)
        for path, group in itertools.groupby(entries, key=lambda entry: entry.file):
            with opened(path) as file:
                for entry in group:
                    yield next(names), file.get_tensor(entry.key)

    def _read_headers(self) -> tuple[list[Entry], Manifest]:
        entries = checkpoint_entries(self._directory)
        names = clean_all(entry.key for entry in entries)
        specs = (
            TensorSpec(name=n, dtype=e.dtype, shape=e.shape) for n, e in zip(names, entries, strict=True)
        )
        self._read = entries, Manifest(tensors=tuple(specs))
        return self._read


def tensor_names(directory: Path) -> list[str]:
    """The names of the directory's tensors, as they stand in its files; ManifestInvalid where it contradicts itself."""
    return [entry.key for entry in checkpoint_entries(directory)]


def checkpoint_entries(directory: Path) -> list[Entry]:
    """Every tensor of the directory, each once, where the index says; ManifestInvalid where it contradicts itself."""
    single, index = directory / SINGLE, directory / INDEX
    if not directory.is_dir():
        raise ManifestInvalid(f"{directory} is not a directory")
    if single.is_file() and index.is_file():
        raise ManifestInvalid(f"{directory} has both {SINGLE} and {INDEX}: remove the one that is stale")
    if single.is_file():
        return _headers(single)
    if index.is_file():
        return _indexed(directory, _weight_map(index))
    raise ManifestInvalid(f"{directory} has neither {SINGLE} nor {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = from_json(index.read_bytes(), _Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestInvalid(f"{index}: {error}") from error
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise ManifestInvalid(f"{index}: {name} is listed in {file!r}, which is not a file's name")
    return weight_map


def _indexed(directory: Path, weight_map: dict[str, str]) -> list[Entry]:
    """The shards' headers, once index and shards were found to say the same."""
    found: dict[str, Entry] = {}
    for file in dict.fromkeys(weight_map.values()):
        for entry in _headers(directory / file):
            name = entry.key
            if name in found:
                raise ManifestInvalid(f"{name} is in two shards, {found[name].file} and {entry.file}")
            if weight_map.get(name) != file:
                listed = f"says {weight_map[name]}" if name in weight_map else "does not list it"
                raise ManifestInvalid(f"{name} is in {entry.file}, and {INDEX} {listed}")
            found[name] = entry
    for name, file in weight_map.items():
        if name not in found:
            raise ManifestInvalid(f"{name} is not in {directory / file}, where {INDEX} says it is")
    return list(found.values())


def _headers(path: Path) -> list[Entry]:
    """What the file's header lists. That the file has all of those bytes is checked by opening it."""
    entries = []
    with opened(path) as file:
        for key in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(key)
            try:
                dtype = DType.from_safetensors(part.get_dtype())
            except ValueError as error:
                raise ManifestInvalid(f"{path}: {key}: {error}") from error
            entries.append(Entry(file=path, key=key, dtype=dtype, shape=tuple(part.get_shape())))
    return entries


@contextmanager
def opened(path: Path) -> Iterator[CheckpointFile]:
    """The file, mapped. Errors of safetensors, now or while the file is read, become ManifestInvalid with its path."""
    try:
        mapped = safe_open(path, framework="pt")
    except ModuleNotFoundError as error:
        raise MissingExtra("publishing a checkpoint", "torch") from error
    except (OSError, SafetensorError) as error:
        raise ManifestInvalid(f"{path}: {error}") from error
    with mapped as file:
        try:
            yield cast(CheckpointFile, file)
        except SafetensorError as error:
            raise ManifestInvalid(f"{path}: {error}") from error
