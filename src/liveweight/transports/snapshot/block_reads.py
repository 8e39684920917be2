"""Block reads: blocks of files read into a rank's shadow, each checked as it arrives. Implements the port's Reading.

Owns the open files, and per thread one block of memory. A block that lands in the shadow in one run is read straight into it, any
other is read beside it and copied. Files that were removed meanwhile stay readable as long as a Reading is held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import BoundCopy, Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import SnapshotDamaged, Unavailable
from liveweight.plan.copies import CopyPlans
from liveweight.spec.decoders import from_json
from liveweight.spec.layout import Layout
from liveweight.spec.row_table import Table
from liveweight.transports.port import GoOn, patient
from liveweight.transports.snapshot.disk.atomic_files import read_all
from liveweight.transports.snapshot.disk.block_buffer import block_memory
from liveweight.transports.snapshot.disk.format import METADATA_SNAPSHOT, block_sum
from liveweight.transports.snapshot.disk.open_snapshot import Contents, FileBlock, FileFacts

_HEADER_BYTES_MAX = 100_000_000  # as safetensors has it
_TRIES = 2
"""A block that is not what was written is read once more: what differs then differs on disk."""


class OpenFiles:
    """The files that a reading needs, open, their headers found to be what was written. Closed when nobody holds this any more."""

    def __init__(self, contents: Contents, needed: Sequence[int]) -> None:
        self._descriptors: dict[int, int] = {}
        # Not at exit: the process gives its descriptors back itself.
        weakref.finalize(self, _close, self._descriptors).atexit = False
        problems = []
        for number in needed:
            facts = contents.files[number]
            try:
                self._descriptors[number] = os.open(facts.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                problems.append(f"{facts.path.name} missing")
            except OSError as error:
                raise Unavailable(f"{facts.path} cannot be opened: {error.strerror}") from error
            else:
                problems += _problems(facts, self._descriptors[number], contents.snapshot)
        if problems:
            raise SnapshotDamaged(contents.where, problems)

    def descriptor(self, number: int) -> int:
        """Of the file of that number."""
        return self._descriptors[number]


@dataclass(slots=True, kw_only=True)
class _Lane:
    """What one thread needs: memory for a block, and the copies out of it."""

    memory: Memory
    block: memoryview
    bound: BoundCopy


class SnapshotReading:
    """A rank's part of some files, bound to its shadow. Rows of one block stand together, in the order of the files."""

    def __init__(
        self,
        contents: Contents,
        target: Layout,
        shadow: Sequence[Memory],
        *,
        kernels: Kernels,
        device: Device = CPU,
        plans: CopyPlans | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """ManifestMismatch or LayoutInvalid where the files do not hold what the target wants; SnapshotDamaged where they are not whole."""
        plan = (plans or CopyPlans()).get(contents.layout(), target)
        order = np.argsort(plan.rows[:, 0], kind="stable")
        self.rows: Table = plan.rows[order]
        self.overlaps = False
        self._contents, self._check = contents, check
        self._kernels, self._device, self._shadow = kernels, device, tuple(shadow)
        numbers = np.unique(self.rows[:, 0])
        self._starts = np.searchsorted(self.rows[:, 0], numbers)
        self._numbers = numbers
        self.files = sorted({contents.blocks[number].file for number in numbers.tolist()})
        self._open = OpenFiles(contents, self.files)
        self._direct = device is CPU
        self._lanes = threading.local()
        self._block_bytes = max((contents.blocks[n].size_bytes for n in numbers.tolist()), default=0)

    def read(self, first: int, last: int, go_on: GoOn = patient) -> None:  # noqa: ARG002 - files do not keep waiting
        """Read and check every block that these rows need, and fill the shadow with them."""
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        while first < last:
            end = int(self._starts[at + 1]) if at + 1 < len(self._starts) else len(self.rows)
            self._block(int(self._numbers[at]), first, min(end, last))
            first, at = min(end, last), at + 1

    def check(self) -> None:
        """Raise where what was read does not stand any more."""
        self._check()

    def end(self) -> None:
        """Nothing is under way: a read is over when it returns."""

    def _block(self, number: int, first: int, last: int) -> None:
        block = self._contents.blocks[number]
        row = self.rows[first]
        if self._direct and last - first == 1 and row[4] * row[7] == 1 and row[10] == block.size_bytes:
            into = self._shadow[row[2]].bytes().data
            self._load(block, into[row[3] : row[3] + block.size_bytes])
            return
        lane = self._lane()
        self._load(block, lane.block[: block.size_bytes])
        lane.bound.run(first, last)

    def _load(self, block: FileBlock, into: memoryview) -> None:
        descriptor, facts = self._open.descriptor(block.file), self._contents.files[block.file]
        for _ in range(_TRIES):
            try:
                count = read_all(descriptor, into, block.offset_bytes)
            except OSError as error:
                raise Unavailable(f"{facts.path} cannot be read: {error.strerror}") from error
            if count < len(into):
                end = block.offset_bytes + count
                raise SnapshotDamaged(self._contents.where, [f"{facts.path.name} truncated at byte {end}"])
            if block.sum is None or block_sum(into) == block.sum:
                return
        where = f"bytes {block.offset_bytes} to {block.offset_bytes + block.size_bytes}, {block.spec.name}"
        raise SnapshotDamaged(self._contents.where, [f"{facts.path.name} corrupted: {where}"])

    def _lane(self) -> _Lane:
        """This thread's own; made at its first use. All blocks are read to the same memory, so one binding is good for all."""
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            memory = block_memory(self._device, self._block_bytes)
            sources = [memory] * len(self._contents.blocks)
            bound = self._kernels.bind_copy(self.rows, sources, self._shadow)
            lane = _Lane(memory=memory, block=memory.bytes().data, bound=bound)
            self._lanes.lane = lane
        return lane


def _close(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _problems(facts: FileFacts, descriptor: int, snapshot: str | None) -> list[str]:
    """What is wrong with a file's size or header. Does not read its weights."""
    size, name = os.fstat(descriptor).st_size, facts.path.name
    if size != facts.size_bytes:
        kind = "truncated" if size < facts.size_bytes else "corrupted"
        return [f"{name} {kind}: {size} bytes, written were {facts.size_bytes}"]
    if facts.header_sum is None:
        return []
    if block_sum(os.pread(descriptor, facts.header_bytes, 0)) == facts.header_sum:
        return []
    found = _snapshot_of(descriptor)
    other = found not in (None, snapshot)
    return [f"{name} stale: of snapshot {found}" if other else f"{name} corrupted: its header"]


def _snapshot_of(descriptor: int) -> str | None:
    """The snapshot that a part's header names, if it can be read at all."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    try:
        entries = from_json(os.pread(descriptor, min(size, _HEADER_BYTES_MAX), 8), dict)
        found = entries["__metadata__"][METADATA_SNAPSHOT]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
    return str(found)
