"""Snapshots beside safetensors: saving beside `save_file` and fsync, restoring beside loading the same bytes into the same tensors.

One process. torch has one thread, as safetensors does its work in one; a restore has those that it takes by itself. Contenders take
turns within every repetition; what is read was written just before and lies in the page cache for both. Peaks are what the process holds
beyond the weights themselves, before safetensors has mapped anything.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from liveweight.devices.cpu import allocate
from liveweight.devices.memory import Memory
from liveweight.errors import DigestMismatch
from liveweight.lab.bench.child_process import reset_peak, resident_bytes
from liveweight.lab.bench.model_shapes import decoder
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import Version
from liveweight.trainer.sources.tensors import view
from liveweight.transports.snapshot.disk.parts import PART_BYTES
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import Image, WriteSettings
from liveweight.transports.snapshot.restore import restore
from liveweight.transports.snapshot.save import SavedSnapshot, save

if TYPE_CHECKING:
    import torch

_TILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How much is saved and restored, how often, in parts of which size, and where; None: the system's temporary directory."""

    size_gb: float = 0.5
    rounds: int = 5
    part_bytes: int = PART_BYTES
    directory: Path | None = None


def bench_snapshot(settings: SnapshotSettings) -> dict[str, Any]:
    """Measure. DigestMismatch if the restored weights are not those that were saved."""
    layout = packed(decoder(int(settings.size_gb * 1e9)))
    size = layout.memories_bytes[0]
    with (
        tempfile.TemporaryDirectory(prefix="liveweight-bench-", dir=settings.directory) as place,
        allocate(size, "the weights") as weights,
        allocate(size, "the restored weights") as restored,
        _one_thread(),
    ):
        _fill(weights.memory)
        bench = _Bench(Path(place), layout, weights.memory, restored.memory, settings)
        peaks = {"save": _peak(bench.save), "restore": _peak(bench.restore)}
        taken: dict[str, list[float]] = {"save_s": [], "save_file_s": [], "restore_s": [], "load_s": []}
        for number in range(settings.rounds):
            for name, run in bench.contenders(ours_first=number % 2 == 1):
                taken[name].append(run())
        parts = bench.parts
    return _report(settings, layout, taken, peaks, parts)


class _Bench:
    """The weights, the memory that they are restored into, and the files of both formats."""

    def __init__(
        self, place: Path, layout: Layout, weights: Memory, restored: Memory, settings: SnapshotSettings
    ) -> None:
        self._store, self._file = Store(place / "snapshots"), place / "model.safetensors"
        self._layout, self._weights, self._restored = layout, weights, restored
        self._settings = WriteSettings(part_bytes=settings.part_bytes)
        self._count = self.parts = 0
        self._path: Path | None = None

    def contenders(self, *, ours_first: bool) -> list[tuple[str, Callable[[], float]]]:
        """What takes turns. Who writes second finds a disk that was just written to, so that changes."""
        saving = [("save_file_s", self._save_file), ("save_s", self.save)]
        reading = [("load_s", self._load), ("restore_s", self.restore)]
        return [*saving[::-1], *reading[::-1]] if ours_first else [*saving, *reading]

    def save(self) -> float:
        """A complete, synced snapshot. The one before is removed first, as save_file's is: both write to memory that was in use."""
        self._count += 1
        if self._path is not None:
            shutil.rmtree(self._path)
        os.sync()
        began_s = time.monotonic()
        image = Image(layout=self._layout, memories=[self._weights])
        saved = save(self._store, Version(run="bench", label=self._count), [image], settings=self._settings)
        took_s = time.monotonic() - began_s
        if isinstance(saved, SavedSnapshot):  # nobody cancels it
            self._path, self.parts = saved.path, len(list(saved.path.glob("*.pdparams")))
        return took_s

    def restore(self) -> float:
        """Into the other memory, which is compared."""
        if self._path is None:
            raise RuntimeError("nothing was saved yet")
        self._restored.bytes()[:] = 0
        began_s = time.monotonic()
        restore(self._path, self._layout, [self._restored])
        took_s = time.monotonic() - began_s
        self._check("the restored weights")
        return took_s

    def _save_file(self) -> float:
        from safetensors.torch import save_file

        self._file.unlink(missing_ok=True)
        os.sync()
        began_s = time.monotonic()
        save_file(self._tensors(self._weights), self._file)
        with self._file.open("rb") as file:
            os.fsync(file.fileno())
        return time.monotonic() - began_s

    def _load(self) -> float:
        from safetensors.torch import load_file

        into = self._tensors(self._restored)
        self._restored.bytes()[:] = 0
        began_s = time.monotonic()
        for name, tensor in load_file(self._file).items():
            into[name].copy_(tensor)
        took_s = time.monotonic() - began_s
        self._check("what safetensors loaded")
        return took_s

    def _tensors(self, memory: Memory) -> dict[str, torch.Tensor]:
        raw, specs = memory.tensor(), self._layout.specs()
        return {p.name: view(raw, p, specs[p.name]) for p in self._layout.placements}

    def _check(self, what: str) -> None:
        wanted, found = self._weights.bytes(), self._restored.bytes()
        for start in range(0, len(wanted), _TILE_BYTES):  # a whole comparison would show in the peak
            part = slice(start, start + _TILE_BYTES)
            if not np.array_equal(wanted[part], found[part]):
                raise DigestMismatch([f"bytes from {start} on"], what)


def _fill(memory: Memory) -> None:
    """Content that differs everywhere: a random tile, shifted with every repetition."""
    tile = np.random.default_rng(0).integers(0, 256, _TILE_BYTES, dtype=np.uint8)
    data = memory.bytes()
    for number, start in enumerate(range(0, len(data), _TILE_BYTES)):
        part = data[start : start + _TILE_BYTES]
        part[:] = np.roll(tile, number)[: len(part)]


def _peak(run: Callable[[], float]) -> int:
    """What the process held beyond what it held before, at the most."""
    before = resident_bytes("VmRSS")
    reset_peak()
    run()
    return max(0, resident_bytes("VmHWM") - before)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(
    settings: SnapshotSettings,
    layout: Layout,
    taken: dict[str, list[float]],
    peaks: dict[str, int],
    parts: int,
) -> dict[str, Any]:
    best = {name: min(times) for name, times in taken.items()}
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "bytes": layout.placed_bytes,
        "tensors": len(layout.tensors),
        "part_bytes": settings.part_bytes,
        "parts": parts,
        "rounds": settings.rounds,
        **{name: {"best": best[name], "median": median[name]} for name in taken},
        "save_ratio": best["save_s"] / best["save_file_s"],
        "restore_ratio": best["restore_s"] / best["load_s"],
        "median_save_ratio": median["save_s"] / median["save_file_s"],
        "median_restore_ratio": median["restore_s"] / median["load_s"],
        "peak_extra_bytes": max(peaks.values()),
        "peak_extra_bytes_of": peaks,
    }
