"""Restoring: fills a rank's memory from the files of a snapshot, ours or FastDeploy's, and reports which files.

The call for programs without rounds: recovery at start-up, the command line, tests. In a round, ranks read through `reader`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.copy_threads import WorkQueue, run_once
from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import Kernels, choose
from liveweight.devices.memory import Memory
from liveweight.plan.copies import row_bytes
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Version
from liveweight.transports.snapshot.block_reads import SnapshotReading
from liveweight.transports.snapshot.disk.fastdeploy_files import SHARED_DIRECTORY, Level, contents_of, find
from liveweight.transports.snapshot.disk.names import COMMIT
from liveweight.transports.snapshot.disk.open_snapshot import Contents, OpenSnapshot
from liveweight.transports.snapshot.disk.writer import Progress, Stop, WritingCancelled

_ROWS = 8
"""How many rows a thread reads before it checks whether to stop."""
_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What was read: from which place, whether every byte was compared with a manifest of ours, and which files were passed over.

    `version` is None where no manifest says it.
    """

    level: Level
    verified: bool
    version: Version | None
    files: tuple[Path, ...]
    passed_over: tuple[Path, ...]
    size_bytes: int
    took_s: float


def restore(
    directory: Path,
    target: Layout,
    memories: Sequence[Memory],
    *,
    rank: int = 0,
    device_id: int | None = None,
    shared: Path | None = SHARED_DIRECTORY,
    device: Device = CPU,
    kernels: Kernels | None = None,
    threads: int | None = None,
    stop: Stop = lambda: False,
    progress: Progress = lambda _: None,
) -> RestoreResult | WritingCancelled:
    """Fill these memories, which the target describes, from a snapshot of any layout, or from FastDeploy's files of this rank.

    With a commit file of ours in the directory, everything is compared and every difference refused by name (SnapshotDamaged).
    Without one, FastDeploy's four places are searched, and the result has `verified=False`. If anything is raised, the memories hold a
    mixture: they must be a shadow, or weights that do not serve. `threads`: as many as there are cores, up to four.
    """
    began_s, number = time.monotonic(), rank if device_id is None else device_id
    with ExitStack() as stack:
        files = _find_files(directory, target, rank, number, shared, stack)
        chosen = (device.choose() if device is not CPU else choose()).kernels if kernels is None else kernels
        reading = SnapshotReading(
            files.contents, target, memories, kernels=chosen, device=device, check=files.check
        )
        done_bytes = _read_all(reading, threads or min(_THREADS, os.cpu_count() or 1), stop, progress)
        if done_bytes is None:
            return WritingCancelled(written_bytes=0)
        return RestoreResult(
            level=files.level,
            verified=files.verified,
            version=files.version,
            files=_files(files.contents, reading),
            passed_over=files.passed_over,
            size_bytes=done_bytes,
            took_s=time.monotonic() - began_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FilesToRead:
    """The files to read, and what is known about them."""

    contents: Contents
    level: Level = "parts"
    verified: bool = False
    version: Version | None = None
    passed_over: tuple[Path, ...] = ()
    check: Callable[[], None] = lambda: None


def _find_files(
    directory: Path, target: Layout, rank: int, device_id: int, shared: Path | None, stack: ExitStack
) -> _FilesToRead:
    """A snapshot of ours, which the stack keeps open, or what is found in FastDeploy's places."""
    if (directory / COMMIT).exists():
        snapshot = stack.enter_context(OpenSnapshot(directory))
        version = snapshot.commit.version
        return _FilesToRead(
            contents=snapshot.contents(), verified=True, version=version, check=snapshot.check
        )
    found = find(directory, rank=rank, device_id=device_id, shared=shared)
    return _FilesToRead(contents=contents_of(found, target), level=found.level, passed_over=found.passed_over)


def _files(contents: Contents, reading: SnapshotReading) -> tuple[Path, ...]:
    return tuple(contents.files[number].path for number in reading.files)


def _read_all(reading: SnapshotReading, threads: int, stop: Stop, progress: Progress) -> int | None:
    """Everything, shared out; how many bytes, or None if it was stopped."""
    sizes, progress_lock = row_bytes(reading.rows), threading.Lock()
    starts = range(0, len(sizes), _ROWS)
    queue = WorkQueue(len(starts))

    def read(_: int, number: int) -> None:
        if stop():
            queue.end()
            return
        first = starts[number]
        reading.read(first, min(first + _ROWS, len(sizes)))
        with progress_lock:
            progress(int(sizes[first : first + _ROWS].sum()))

    reading.check()
    run_once(threads, lambda lane: queue.work_through(lane, read), name="liveweight-restore")
    if queue.ended():
        return None
    reading.check()
    return int(sizes.sum())
