"""How rounds grow: with bytes, tensors, ranks and replicas. One axis at a time; the others stay where they are.

Live rounds over shared memory. Each point is a scene of its own; its best round counts, and the limit, one plain copy of the same bytes by
the same ranks, stands beside it, because cores are shared by as many ranks as there are. An exponent is fitted to each axis: 1 is
linear, 0 is constant.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from liveweight.lab.bench.model_shapes import decoder, small_tensors
from liveweight.lab.bench.rounds.ipc import IpcSettings, Scene

Axis: TypeAlias = Literal["size_gb", "tensors", "ranks", "replicas"]
AXES: tuple[Axis, ...] = ("size_gb", "tensors", "ranks", "replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSettings:
    """The points of each axis, and what stays on the others: `base_gb` bytes, two ranks, one replica.

    Tensors share `tensors_gb`: 40,000 of them are of 32 KB each, as those of many small experts.
    """

    sizes_gb: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    tensors: tuple[int, ...] = (400, 4000, 40_000)
    ranks: tuple[int, ...] = (1, 2, 4)
    replicas: tuple[int, ...] = (1, 2, 4)
    base_gb: float = 0.5
    tensors_gb: float = 1.31
    rounds: int = 5


def bench_growth(settings: GrowthSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    base = settings.base_gb
    points: dict[Axis, list[tuple[float, IpcSettings]]] = {
        "size_gb": [(gb, IpcSettings(size_gb=gb)) for gb in settings.sizes_gb],
        "tensors": [
            (count, IpcSettings(size_gb=settings.tensors_gb, tensors=count)) for count in settings.tensors
        ],
        "ranks": [(count, IpcSettings(size_gb=base, ranks=count)) for count in settings.ranks],
        "replicas": [(count, IpcSettings(size_gb=base, replicas=count)) for count in settings.replicas],
    }
    axes = {axis: [{"at": at} | _point(one, settings.rounds) for at, one in points[axis]] for axis in AXES}
    return {
        "cores": os.cpu_count(),
        "rounds": settings.rounds,
        "base_gb": base,
        "tensors_gb": settings.tensors_gb,
        "axes": axes,
        "exponents": {axis: _exponents(found) for axis, found in axes.items()},
        **_ratios(axes),
    }


def _point(settings: IpcSettings, rounds: int) -> dict[str, Any]:
    """The best of some rounds, plain and verified, and the memory of the processes beside their weights."""
    size = int(settings.size_gb * 1e9)
    specs = small_tensors(size, settings.tensors) if settings.tensors else decoder(size)
    with Scene(specs, settings) as scene:
        for _ in range(2):  # to either shadow of the ranks
            scene.publish("live", verify=True)
        scene.reset_peaks()
        limits, plain, verified = [], [], []
        for _ in range(rounds):
            limits.append(scene.limit())
            plain.append(scene.publish("live", verify=False))
            verified.append(scene.publish("live", verify=True))
        scene.check()
        peaks = scene.peaks()
    return {
        "bytes": sum(spec.size_bytes for spec in specs),
        "tensors": len(specs),
        "plain_s": min(plain),
        "verified_s": min(verified),
        "limit_s": min(limits),
        "peak_extra_bytes": max(peaks.values()),
    }


def _exponents(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    places = [point["at"] for point in points]
    return {
        key: exponent(places, [point[key] for point in points])
        for key in ("plain_s", "verified_s", "limit_s")
    }


def exponent(places: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line through the logarithms: values grow as places to that power."""
    xs, ys = [math.log(place) for place in places], [math.log(value) for value in values]
    middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle) ** 2 for x in xs)
    return sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _ratios(axes: dict[Axis, list[dict[str, Any]]]) -> dict[str, float]:
    """Time per byte at the largest size over that at 0.5 GB (or the nearest), and the most tensors over the fewest at equal bytes."""
    sizes = axes["size_gb"]
    half = min(sizes, key=lambda point: abs(point["at"] - 0.5))
    per_byte = {id(point): point["plain_s"] / point["bytes"] for point in (half, sizes[-1])}
    few, many = axes["tensors"][0], axes["tensors"][-1]
    return {
        "size_ratio": per_byte[id(sizes[-1])] / per_byte[id(half)],
        "tensors_ratio": many["plain_s"] / many["bytes"] / (few["plain_s"] / few["bytes"]),
        "tensors_verified_ratio": many["verified_s"] / many["bytes"] / (few["verified_s"] / few["bytes"]),
    }
