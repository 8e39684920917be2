"""Part plans: which regions of a rank's layout go into which part file, and where. Pure.

A part is filled in the layout's order until the next region would exceed its size; a tensor is never cut, so that FastDeploy finds it
under its name: one that is larger than a part has a part of its own. Inside a part, wide items come first: all are aligned.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from liveweight.spec.layout import Layout, Placement, contiguous_strides
from liveweight.spec.manifest import TensorSpec
from liveweight.spec.region import Region, canonical, count, counts
from liveweight.transports.snapshot.disk.format import blocks, sizes_bytes

PART_BYTES = 256 << 20
_HEADER_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
"""What no tensor can be called in a safetensors file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPiece:
    """A region on its way into a part: the tensor that it is of, and the name that the part gives it."""

    key: str
    spec: TensorSpec
    region: Region

    @property
    def size_bytes(self) -> int:
        """Bytes of the region."""
        return count(self.region) * self.spec.dtype.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBlock:
    """A run of a piece's bytes, as a region of its own: piece `piece` of the part, in window `window`, from there on."""

    piece: int
    region: Region
    size_bytes: int
    window: int
    offset_bytes: int


def plan_parts(layout: Layout, part_bytes: int) -> list[tuple[PartPiece, ...]]:
    """The pieces of every part. Regions that the layout holds more than once are written once."""
    parts: list[list[PartPiece]] = []
    room = 0
    for piece in _pieces(layout):
        if not parts or piece.size_bytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(piece)
        room -= piece.size_bytes
    return [tuple(sorted(part, key=lambda piece: -piece.spec.dtype.size_bytes)) for part in parts]


def _pieces(layout: Layout) -> Iterator[PartPiece]:
    specs, taken, seen = layout.specs(), {spec.name for spec in layout.tensors}, set()
    first = {_METADATA}
    for placement in layout.placements:
        spec, region = specs[placement.name], canonical(placement.region)
        if (spec.name, region) in seen or (count(region) == 0 and spec.elements):
            continue
        seen.add((spec.name, region))
        key = spec.name
        if spec.name in first:
            key = next(name for number in itertools.count(1) if (name := f"{key}#{number}") not in taken)
        first.add(spec.name)
        taken.add(key)
        yield PartPiece(key=key, spec=spec, region=region)


def plan_windows(pieces: Sequence[PartPiece], block_bytes: int) -> list[PartBlock]:
    """The blocks of a part in its order, gathered into windows of at most that size: what is written at a time."""
    planned: list[PartBlock] = []
    window, used = 0, 0
    for number, piece in enumerate(pieces):
        regions = blocks(piece.region, piece.spec.dtype.size_bytes, block_bytes)
        for region, size in zip(regions, sizes_bytes(regions, piece.spec.dtype.size_bytes), strict=True):
            if used + size > block_bytes and used:
                window, used = window + 1, 0
            planned.append(
                PartBlock(piece=number, region=region, size_bytes=size, window=window, offset_bytes=used)
            )
            used += size
    return planned


def windows_layout(pieces: Sequence[PartPiece], planned: Sequence[PartBlock]) -> Layout:
    """Where the blocks lie in their windows: memory i is window i, placement i is block i."""
    sizes = [0] * (planned[-1].window + 1 if planned else 0)
    for block in planned:
        sizes[block.window] = block.offset_bytes + block.size_bytes
    return Layout(
        tensors=tuple({piece.spec.name: piece.spec for piece in pieces}.values()),
        memories_bytes=tuple(sizes),
        placements=tuple(
            block_placement(
                pieces[block.piece].spec, block.region, memory=block.window, offset_bytes=block.offset_bytes
            )
            for block in planned
        ),
    )


def block_placement(spec: TensorSpec, region: Region, *, memory: int, offset_bytes: int = 0) -> Placement:
    """A region that lies row-major, in one run."""
    strides = contiguous_strides(counts(region), spec.dtype)
    return Placement(
        name=spec.name, region=region, memory=memory, offset_bytes=offset_bytes, strides_bytes=strides
    )


def header(pieces: Sequence[PartPiece], metadata: dict[str, str]) -> bytes:
    """The header of a safetensors file that holds these pieces, one after the other."""
    ends = list(itertools.accumulate((piece.size_bytes for piece in pieces), initial=0))
    entries: dict[str, object] = {_METADATA: metadata}
    for piece, (begin, end) in zip(pieces, itertools.pairwise(ends), strict=True):
        entries[piece.key] = {
            "dtype": piece.spec.dtype.safetensors,
            "shape": list(counts(piece.region)),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
