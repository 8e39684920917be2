"""The source half of `ipc_snapshot`: writes the contents of arenas into files, and offers the files.

Owns a directory of its own, and in it one snapshot per offered layout. Arenas are private memory: no other process reads them. The next
transport source in the same parent directory removes a directory that a killed source left behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from liveweight.devices.cpu import allocate
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, Refused, WrongState
from liveweight.observe.events import OfferKind
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Version
from liveweight.transports.ipc.arena import CLOSED, combined
from liveweight.transports.port import Arena
from liveweight.transports.registry import mode
from liveweight.transports.snapshot.disk.atomic_files import open_locked, out_of_space, write_whole
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, RankWriter, WriteSettings
from liveweight.transports.snapshot.offer_record import (
    LOCK,
    MODE,
    SCHEME,
    OfferRecord,
    encode_record,
    record_name,
)
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import Offer

_PREFIX = "snapshots-"
_GENERATION_BITS = 48


class FileArena:
    """Memory of the source's process, with its generation in a file. Used by the publisher's driver thread."""

    def __init__(self, size_bytes: int, device: Device, path: Path, *, populated: bool = True) -> None:
        """Allocate it. OutOfMemory where it cannot be had; nothing is left behind then."""
        self.size_bytes, self.device, self.path = size_bytes, device, path
        self._memory: Memory | None = _allocate(size_bytes, device, populated=populated)
        self.generation = 1 + secrets.randbits(_GENERATION_BITS)
        """As in the file; CLOSED after `close`."""
        write_whole(path, self.generation.to_bytes(8, "little"), durable=False)

    @property
    def memory(self) -> Memory:
        """The data. Its owner is a tensor of the bytes."""
        if self._memory is None:
            raise WrongState("closed", "using an arena")
        return self._memory

    def raise_generation(self) -> int:
        """Revoke every reader of the files that were written of it; returns the new generation."""
        if self._memory is None:
            raise WrongState("closed", "using an arena")
        self.generation += 1
        write_whole(self.path, self.generation.to_bytes(8, "little"), durable=False)
        return self.generation

    def close(self) -> None:
        """Release the memory; readers are revoked."""
        self._memory, self.generation = None, CLOSED
        with suppress(OSError):
            self.path.unlink()


def _allocate(size_bytes: int, device: Device, *, populated: bool) -> Memory:
    """Allocates host memory without torch, which a trainer may not have."""
    if device is CPU:
        return allocate(size_bytes, "an arena", populated=populated).memory
    return Memory.of_view(device.allocate([size_bytes], "an arena")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOffer:
    """What was written of a layout: from these arenas, at that generation, there."""

    arenas: tuple[FileArena, ...]
    generation: int
    snapshot: Path


class SnapshotSource:
    """Lets ranks read arenas through files below `directory`. One per publisher, called from its driver thread. No thread of its own."""

    def __init__(
        self,
        directory: Path,
        secret: Secret,
        *,
        device: Device | None = None,
        settings: WriteSettings | None = None,
    ) -> None:
        self._secret, self._device = secret, CPU if device is None else device
        self._settings = settings or WriteSettings(digest=False, durable=False)
        _remove_abandoned(directory)
        self._directory = directory.absolute() / f"{_PREFIX}{secrets.token_hex(8)}"
        self._lock: int | None = _create_locked(self._directory)
        self._written: dict[tuple[OfferKind, str], _WrittenOffer] = {}

    @property
    def address(self) -> str:
        """The directory of the files, as a URL."""
        return f"{SCHEME}{self._directory}"

    def allocate(
        self,
        size_bytes: int,
        kind: OfferKind = "frozen",  # noqa: ARG002 - all alike
        *,
        populated: bool = True,
    ) -> FileArena:
        """An arena of that size, the caller's to close; OutOfMemory where it cannot be had."""
        path = self._directory / f"arena-{secrets.token_hex(8)}"
        return FileArena(size_bytes, self._device, path, populated=populated)

    def offer(self, layout: Layout, arenas: Sequence[Arena], kind: OfferKind) -> Offer:
        """Write what these arenas hold, as they are now, and offer it in directory of what was written before.

        OutOfSpace where it cannot be written: then nothing of that layout is offered.
        """
        _check_kind(kind)
        own = _fitting(layout, arenas)
        self._device.synchronise()
        generation, key = combined(arena.generation for arena in own), (kind, layout.fingerprint)
        known = self._written.get(key)
        if known is None or (known.arenas, known.generation) != (own, generation):
            self._withdraw(key)
            path = self._write(layout, own)
            self._written[key] = _WrittenOffer(arenas=own, generation=generation, snapshot=path)
            record = OfferRecord(
                kind=kind,
                layout=layout.fingerprint,
                snapshot=path.name,
                arenas=tuple(arena.path.name for arena in own),
                generation=generation,
            )
            data = encode_record(record, self._secret)
            write_whole(self._directory / record_name(kind, layout.fingerprint), data, durable=False)
        return Offer(
            mode=MODE, kind=kind, source=self.address, layout=layout.fingerprint, generation=generation
        )

    def withdraw(self, layout: Layout) -> None:
        """Remove that layout's files. Ranks that have them open read on; they find that they are revoked when the arena changes."""
        for key in [key for key in self._written if key[1] == layout.fingerprint]:
            self._withdraw(key)

    def close(self) -> None:
        """Remove all files. The owner of the arenas closes them. May be called twice."""
        self._written.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, layout: Layout, arenas: tuple[FileArena, ...]) -> Path:
        image = Image(layout=layout, memories=[arena.memory for arena in arenas], device=self._device)
        with Store(self._directory).begin("offer") as draft:
            RankWriter(draft.path, image, snapshot=draft.snapshot, rank=0, settings=self._settings).write()
            draft.commit(Version(run=self._directory.name, label=layout.fingerprint), ranks=1, durable=False)
            return draft.path

    def _withdraw(self, key: tuple[OfferKind, str]) -> None:
        known = self._written.pop(key, None)
        if known is not None:
            with suppress(OSError):
                (self._directory / record_name(*key)).unlink()
            shutil.rmtree(known.snapshot, ignore_errors=True)


def _check_kind(kind: OfferKind) -> None:
    offers = mode(MODE).offers
    if kind not in offers:
        raise Refused(f"{MODE} has no {kind} offers, only {', '.join(offers)}")


def _fitting(layout: Layout, arenas: Sequence[Arena]) -> tuple[FileArena, ...]:
    """The arenas, if they are the layout's memories and are ours."""
    own = tuple(arena for arena in arenas if isinstance(arena, FileArena))
    if len(own) != len(arenas):
        raise LayoutInvalid(f"{MODE} offers only memory that it allocated itself")
    sizes = tuple(arena.size_bytes for arena in own)
    if sizes != layout.memories_bytes:
        raise LayoutInvalid(f"arenas of {sizes} bytes for a layout of {layout.memories_bytes}")
    return own


def _create_locked(directory: Path) -> int:
    """Create a directory and return the lock on it. It is locked under another name first, so that nobody finds it unlocked."""
    making = directory.with_name(f".{directory.name}")
    try:
        making.mkdir(mode=0o700)
        (making / LOCK).touch()
        lock = open_locked(making / LOCK, exclusive=True)
        making.rename(directory)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise out_of_space(directory, error) from error
    if lock is None:
        raise WrongState("locked by somebody else", f"using {directory}")
    return lock


def _remove_abandoned(directory: Path) -> None:
    """Remove the directories of killed sources: nobody holds their locks."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = open_locked(path / LOCK, exclusive=True)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
