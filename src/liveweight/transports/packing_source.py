"""The packing source: the trainer's memory, where it lies and in its own dtypes, from which a ring is packed.

A value that keeps the memory alive. The memory must not change while its offer stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.spec.layout import Layout, Placement

Put: TypeAlias = Callable[[Placement, Memory], None]
"""Writes a region of one tensor, packed, to its place in a memory. For tensors that no kernel can read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingSource:
    """`offered` is the layout that ranks see: tensors in the dtypes in which they are offered, and their regions.

    `held` says where the same tensors lie in `memories`, in their own dtypes; it may leave out the tensors of `foreign`.
    """

    offered: Layout
    held: Layout
    memories: Sequence[Memory]
    kernels: Kernels
    foreign: Mapping[str, Put] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSettings:
    """How large a ring is, and in how many segments; a bucket fills one."""

    size_bytes: int = 96 << 20
    segments: int = 6

    def __post_init__(self) -> None:
        if self.segments < 2 or self.segment_bytes < 4096:
            raise ValueError(
                f"a ring of {self.size_bytes} bytes in {self.segments} segments: at least 2, of 4096 bytes each"
            )

    @property
    def segment_bytes(self) -> int:
        """Of one segment: whole pages."""
        return self.size_bytes // self.segments // 4096 * 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedBucket:
    """A bucket that a rank found damaged and had packed again: its number, and the first tensor in it."""

    bucket: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCounts:
    """What a ring did for one offer: buckets and bytes that were packed, ranks that have staged, buckets that were packed again."""

    buckets: int
    size_bytes: int
    staged: int
    damaged: tuple[DamagedBucket, ...]
