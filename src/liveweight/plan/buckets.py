"""Bucket plans: how a stream of tensors is cut into buckets.

Deterministic, in layer order, aligned; a tensor may span buckets. transports/ packs the buckets and hands them over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from liveweight.spec.layout import ALIGNMENT_BYTES, align
from liveweight.spec.manifest import Manifest, TensorSpec

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A run of one tensor's bytes, and where it lies in its bucket."""

    name: str
    tensor_offset_bytes: int
    bucket_offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one bucket carries, in order."""

    slices: tuple[Slice, ...]
    size_bytes: int


def layer_order(manifest: Manifest) -> list[TensorSpec]:
    """The tensors layer by layer, by number. What belongs to no layer keeps its side: before the layers, or after."""
    layers = [_layer(tensor.name) for tensor in manifest]
    first = next((i for i, layer in enumerate(layers) if layer is not None), 0)
    last = max((layer for layer in layers if layer is not None), default=0) + 1

    def place(index: int) -> tuple[int, int]:
        layer = layers[index]
        if layer is None:
            layer = -1 if index < first else last
        return layer, index

    return [manifest.tensors[index] for index in sorted(range(len(layers)), key=place)]


def plan_buckets(
    manifest: Manifest, *, bucket_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES
) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, filled in layer order; every slice begins aligned."""
    if bucket_bytes < alignment_bytes or bucket_bytes % alignment_bytes:
        raise ValueError(f"a bucket of {bucket_bytes} bytes does not hold whole {alignment_bytes}-byte lines")
    return tuple(_filled(layer_order(manifest), bucket_bytes, alignment_bytes))


def _filled(tensors: Sequence[TensorSpec], bucket_bytes: int, alignment_bytes: int) -> Iterator[Bucket]:
    slices: list[Slice] = []
    used = 0
    for tensor in tensors:
        done = 0
        while True:
            start = align(used, alignment_bytes)
            size = min(tensor.size_bytes - done, bucket_bytes - start)
            if size or not tensor.size_bytes:
                slices.append(
                    Slice(
                        name=tensor.name, tensor_offset_bytes=done, bucket_offset_bytes=start, size_bytes=size
                    )
                )
                used, done = start + size, done + size
            else:
                yield Bucket(slices=tuple(slices), size_bytes=used)
                slices, used = [], 0
            if done == tensor.size_bytes:
                break
    if slices:
        yield Bucket(slices=tuple(slices), size_bytes=used)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found.group(1))
