"""What a digest costs, beside a plain copy of the same bytes: one core, warm memory, one interleaved run.

Contenders take turns within every repetition, so that what else the machine does hits all alike. Ratios are of the best times.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from liveweight.devices.kernels import Kernels, choose
from liveweight.devices.memory import Memory
from liveweight.devices.numpy_kernels import NumpyKernels
from liveweight.errors import DigestMismatch, MissingExtra
from liveweight.lab.bench.digest_inputs import COLUMNS, Inputs, make_inputs
from liveweight.spec.digest import Lanes

Contender = Callable[[], Lanes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender: what it read, per repetition, and how long that took."""

    name: str
    size_bytes: int
    seconds: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """Its best time."""
        return min(self.seconds)

    @property
    def median_s(self) -> float:
        """Its median time."""
        return statistics.median(self.seconds)

    @property
    def best_gb_s(self) -> float:
        """GB/s of bytes read, at its best."""
        return self.size_bytes / self.best_s / 1e9

    @property
    def median_gb_s(self) -> float:
        """GB/s of bytes read, at its median."""
        return self.size_bytes / self.median_s / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """The measurement of one run. Rates count the source's bytes once."""

    timings: Mapping[str, Timing]
    kernels: str
    cores: int
    pinned_core: int
    machine: str
    size_mb: int
    columns: int

    @property
    def c_ratio(self) -> float:
        """The digest's rate over the plain copy's, which is memmove."""
        return self.timings["memmove"].best_s / self.timings["digest"].best_s

    @property
    def fused_ratio(self) -> float:
        """The time of copying and digesting over the plain copy's."""
        return self.timings["copy + digest"].best_s / self.timings["memmove"].best_s

    @property
    def own_c_ratio(self) -> float:
        """The digest's rate over that of our own copy, which streams past the caches."""
        return self.timings["copy"].best_s / self.timings["digest"].best_s

    @property
    def own_fused_ratio(self) -> float:
        """The time of copying and digesting over our own copy's."""
        return self.timings["copy + digest"].best_s / self.timings["copy"].best_s

    @property
    def cast_ratio(self) -> float:
        """The time of casting, copying and digesting over the plain cast's: the faster of torch and our own."""
        return self.timings["cast + digest"].best_s / self._cast_s()

    def _cast_s(self) -> float:
        return min(self.timings[name].best_s for name in ("cast", "torch cast"))

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        rates = {
            name: {
                "best_gb_s": round(timing.best_gb_s, 3),
                "median_gb_s": round(timing.median_gb_s, 3),
                "best_s": timing.best_s,
                "median_s": timing.median_s,
                "read_bytes": timing.size_bytes,
            }
            for name, timing in self.timings.items()
        }
        return {
            "c_ratio": round(self.c_ratio, 4),
            "fused_ratio": round(self.fused_ratio, 4),
            "cast_ratio": round(self.cast_ratio, 4),
            "own_c_ratio": round(self.own_c_ratio, 4),
            "own_fused_ratio": round(self.own_fused_ratio, 4),
            "kernels": self.kernels,
            "cores": self.cores,
            "pinned_core": self.pinned_core,
            "machine": self.machine,
            "size_mb": self.size_mb,
            "columns": self.columns,
            "repeats": len(next(iter(self.timings.values())).seconds),
            "timings": rates,
        }


def bench_digest(*, size_mb: int = 256, repeats: int = 15) -> DigestReport:
    """Measure. Pins this process to one core and torch to one thread while it runs; needs about five times `size_mb` of memory.

    Raises DigestMismatch if a contender's result is wrong.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("the benchmark's torch contenders", "torch") from None
    if size_mb < 1 or repeats < 1:
        raise ValueError(f"{size_mb} MB, {repeats} repeats")
    threads = torch.get_num_threads()
    with _one_core() as core:
        torch.set_num_threads(1)
        try:
            inputs = make_inputs(size_mb)
            chosen = choose()
            timings = _measure(contenders(inputs, chosen.kernels), inputs, repeats)
        finally:
            torch.set_num_threads(threads)
    return DigestReport(
        timings=timings,
        kernels=chosen.name,
        cores=os.cpu_count() or 1,
        pinned_core=core,
        machine=platform.machine(),
        size_mb=size_mb,
        columns=COLUMNS,
    )


def contenders(inputs: Inputs, kernels: Kernels) -> dict[str, tuple[Contender, int]]:
    """What is measured, by name, and the bytes that each reads."""
    import torch

    from liveweight.devices.torch_digest import digest_tensor

    words, floats, target = inputs.words, inputs.floats, inputs.target
    memories = [Memory.from_array(words)], [Memory.from_array(floats)], [Memory.from_array(target)]
    digest = kernels.bind_digest(inputs.digest_rows, memories[0], 1)
    slow = NumpyKernels().bind_digest(inputs.digest_rows, memories[0], 1)
    copy = kernels.bind_copy(inputs.copy_rows, memories[0], memories[2])
    fused = kernels.bind_freeze(inputs.freeze_rows, memories[0], memories[2], 1)
    cast = kernels.bind_freeze(inputs.cast_rows, memories[1], memories[2], 1)
    into, source = torch.from_numpy(target).view(torch.bfloat16), torch.from_numpy(floats)
    view = torch.from_numpy(words).view(torch.bfloat16)
    return {
        "memmove": (lambda: _memmove(target, words), words.nbytes),
        "copy": (lambda: copy.run(0, 1), words.nbytes),
        "digest": (lambda: digest.run(0, 1)[0], words.nbytes),
        "copy + digest": (lambda: fused.run(0, 1)[0], words.nbytes),
        "torch cast": (lambda: _nothing(into.copy_(source)), floats.nbytes),
        "cast": (lambda: cast.move(0, 1), floats.nbytes),
        "cast + digest": (lambda: cast.run(0, 1)[0], floats.nbytes),
        "NumPy digest": (lambda: slow.run(0, 1)[0], words.nbytes),
        "torch digest": (lambda: digest_tensor(view, inputs.region, inputs.spec), words.nbytes),
    }


SLOW = ("NumPy digest", "torch digest")
"""Too slow to repeat as often as the others: once."""


def _measure(named: Mapping[str, tuple[Contender, int]], inputs: Inputs, repeats: int) -> dict[str, Timing]:
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for repeat in range(-1, repeats):  # the first one warms up, and checks that everybody did the work
        for name, (run, _) in named.items():
            if name in SLOW and repeat not in (-1, 0):
                continue
            if repeat < 0:
                inputs.target[...] = 0
            began = time.perf_counter()
            result = run()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
            else:
                inputs.check(name, result)
    return {
        name: Timing(name=name, size_bytes=size, seconds=tuple(seconds[name]))
        for name, (_, size) in named.items()
    }


@contextmanager
def _one_core() -> Iterator[int]:
    """This process on the last of its cores, and back to all of them."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield max(cores)
    finally:
        os.sched_setaffinity(0, cores)


def _memmove(target: npt.NDArray[np.uint16], source: npt.NDArray[np.uint16]) -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def _nothing(_: object) -> None:
    """Throw a result away."""


__all__ = ["DigestMismatch", "DigestReport", "Timing", "bench_digest", "contenders"]
