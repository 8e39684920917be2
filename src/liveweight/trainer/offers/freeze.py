"""The freeze: a source's tensors copied into an arena, in the engine's dtypes, digested on the way.

Owns the layout of a frozen arena and the bindings that fill it. The publisher decides when readers are
revoked and when the arena may be offered. After a freeze that raises, the arena must not be offered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from liveweight.devices.copy_ranges import ranges, run_shared, summed
from liveweight.devices.kernels import BoundDigest, BoundFreeze, Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, ManifestMismatch
from liveweight.plan.freezes import CASTS, row_bytes
from liveweight.spec.digest import SEEDS, Lanes
from liveweight.spec.dtype import DType, castable
from liveweight.spec.layout import packed_regions
from liveweight.spec.manifest import Manifest, TensorSpec, named_as
from liveweight.spec.region import Region, whole
from liveweight.spec.row_table import Table
from liveweight.trainer.offers.freeze_tables import Templates, digest_rows, freeze_rows
from liveweight.trainer.sources.one_shot_source import OneShotSource
from liveweight.trainer.sources.source import Source, check_tensor, one_pass, whole_pass
from liveweight.trainer.sources.tensors import (
    AnyTensor,
    copy_into,
    dtype_of,
    extent_bytes,
    strides_bytes,
    without_gradients,
)

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 256 << 10
"""A streamed tensor below this is copied without a kernel and digested with the others at the end: binding it would cost more."""

Part: TypeAlias = tuple[TensorSpec, Region]
"""A full tensor, and the part of it that is meant."""

TensorLocation: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype | DType, bool]"
"""Where and how a tensor lies: address, shape, strides, dtype, and whether it is in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeResult:
    """What a freeze did: the digests of the arena's tensors in the manifest's order, if asked for; bytes written; seconds."""

    lanes: Lanes | None
    size_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundMoves:
    """Tensors that kernels freeze, bound to where they lie now. Slot i is tensor `numbers[i]`."""

    numbers: Table
    bound: BoundFreeze
    sizes_bytes: Table

    def run(self, threads: int, lanes: Lanes | None) -> None:
        """Freeze them. Only when they are known to be where they were bound."""
        shares = ranges(self.sizes_bytes, threads)
        if lanes is None:
            run_shared(self.bound.move, shares, threads)
        else:
            lanes[self.numbers] = summed(run_shared(self.bound.run, shares, threads), len(self.numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundDigests:
    """Tensors that are digested in the arena, after they were cast into it."""

    numbers: Sequence[int]
    arena: Memory
    bound: BoundDigest
    sizes_bytes: Table

    def run(self, threads: int) -> Lanes:
        """Their digests."""
        shares = ranges(self.sizes_bytes, threads)
        return summed(run_shared(self.bound.run, shares, threads), len(self.numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundSource:
    """The bound moves of a held source, or of one tensor of a stream, valid while no tensor moves."""

    arena: Memory
    locations: Sequence[TensorLocation]
    moves: _BoundMoves
    by_cast: Sequence[int]


def offered_manifest(source: Manifest, expected: Manifest) -> Manifest:
    """The source's tensors under the engine's names, in the dtypes that they are offered in: the engine's, where that is a cast between
    `CASTABLE` ones.

    Every other difference is left for `compare` to refuse.
    """
    wanted = expected.by_name()
    return Manifest(tensors=tuple(_offered(spec, wanted) for spec in named_as(source, expected)))


def _offered(spec: TensorSpec, wanted: Mapping[str, TensorSpec]) -> TensorSpec:
    want = next((wanted[name] for name in spec.names if name in wanted), spec)
    if want.dtype is spec.dtype or not castable(spec.dtype, want.dtype):
        return spec
    return msgspec.structs.replace(spec, dtype=want.dtype, digest=None)


class Freezer:
    """Fills arenas with one source's tensors. Keeps what it bound for the next round, and with it the arena, but no tensor.

    Called from the thread that offers; `layout` is where the tensors of the offered manifest lie in the arena.
    """

    def __init__(
        self, source: Manifest, offered: Manifest, kernels: Kernels, parts: Sequence[Part] | None = None
    ) -> None:
        """`parts` says of which tensors, and which regions of them, the offered ones are parts; left out, they are whole."""
        for have, want in zip(source, offered, strict=False):
            if have.shape != want.shape or set(have.names).isdisjoint(want.names):
                raise LayoutInvalid(
                    f"{have.name} cannot be frozen as {want.name} of shape {list(want.shape)}"
                )
        if len(source.tensors) != len(offered.tensors):
            raise LayoutInvalid(f"{len(source.tensors)} tensors to be frozen as {len(offered.tensors)}")
        self._parts = [(t, whole(t.shape)) for t in offered] if parts is None else list(parts)
        self.layout = packed_regions(self._parts)
        self._offered = offered
        self._source, self._kernels = source, kernels
        self._offsets = [placement.offset_bytes for placement in self.layout.placements]
        self._names = [spec.name for spec in source]
        self._size_bytes = offered.size_bytes
        self._templates = Templates()
        self._bound_source: _BoundSource | None = None
        self._bound_streamed: dict[int, _BoundSource] = {}
        self._bound_digests: _BoundDigests | None = None

    def freeze(self, source: Source, arena: Memory, *, threads: int, digest: bool) -> FreezeResult:
        """Copy every tensor to its place, by that many threads. Whatever is raised, the arena holds nothing that may be offered."""
        began_s = time.monotonic()
        if arena.size_bytes < self.layout.memories_bytes[0] or not arena.writable:
            kind = "writable" if arena.writable else "read-only"
            raise LayoutInvalid(
                f"a {kind} arena of {arena.size_bytes} bytes for {self.layout.memories_bytes[0]} bytes of tensors"
            )
        lanes = np.zeros((len(self._offsets), SEEDS), dtype=np.uint32) if digest else None
        with without_gradients():
            freeze = self._freeze_held if source.held else self._freeze_streamed
            freeze(source, arena, threads, lanes)
        return FreezeResult(lanes=lanes, size_bytes=self._size_bytes, took_s=time.monotonic() - began_s)

    def forget(self) -> None:
        """Drop the references to the arena. Called before the arena is closed."""
        self._bound_source = self._bound_digests = None
        self._bound_streamed.clear()

    def _freeze_held(self, source: Source, arena: Memory, threads: int, lanes: Lanes | None) -> None:
        tensors = whole_pass(source, self._names)
        bound = self._bound_source
        if bound is None or bound.arena is not arena or not unmoved(tensors, bound.locations):
            self._bound_source = None
            self._bound_source = bound = self._bind_held(tensors, arena)
        bound.moves.run(threads, lanes)
        for number in bound.by_cast:
            spec, placement = self._offered.tensors[number], self.layout.placements[number]
            copy_into(arena, placement, spec, tensors[number])
        self._digest(bound.by_cast, arena, threads, lanes)

    def _freeze_streamed(self, source: Source, arena: Memory, threads: int, lanes: Lanes | None) -> None:
        later: list[int] = []
        tied: set[int] = set()
        for number, tensor in self._arrivals(source):
            spec = self._offered.tensors[number]
            before = None if lanes is None or number not in tied else lanes[number].copy()
            if spec.size_bytes >= SMALL_BYTES and self._has_kernel(number, tensor):
                self._bind_streamed(number, tensor, arena).run(threads, lanes)
            else:
                copy_into(arena, self.layout.placements[number], spec, tensor)
                if not spec.aliases:
                    later.append(number)
                elif lanes is not None:
                    lanes[[number]] = self._bind_digests([number], arena).run(threads)
            del tensor  # the iterator may want its memory for the next one
            if spec.aliases:
                tied.add(number)
            if before is not None and lanes is not None and (lanes[number] != before).any():
                raise ManifestMismatch(
                    [
                        f"{' and '.join(spec.names)} are one tensor at the engine, and came with different content"
                    ]
                )
        self._digest(sorted(later), arena, threads, lanes)

    def _arrivals(self, source: Source) -> Iterator[tuple[int, AnyTensor]]:
        """One pass over a source: the number of each tensor, and the tensor, checked. Of a one-shot source in any order."""
        if isinstance(source, OneShotSource):
            yield from source.arrivals()
            return
        number = 0
        for tensor in one_pass(source, self._names):
            check_tensor(self._source.tensors[number], tensor)
            yield number, tensor
            del tensor
            number += 1  # noqa: SIM113 - enumerate would hold the tensor while the next one is made

    def _bind_streamed(self, number: int, tensor: AnyTensor, arena: Memory) -> _BoundMoves:
        """The moves of one tensor; those of the pass before, if it comes from the same place again."""
        known = self._bound_streamed.get(number)
        if known is None or known.arena is not arena or not unmoved([tensor], known.locations):
            moves = self._bind([number], [tensor], arena)
            known = _BoundSource(arena=arena, locations=[location_of(tensor)], moves=moves, by_cast=())
            self._bound_streamed[number] = known
        return known.moves

    def _bind_held(self, tensors: Sequence[AnyTensor], arena: Memory) -> _BoundSource:
        by_kernel: list[int] = []
        by_cast: list[int] = []
        for number, (spec, tensor) in enumerate(zip(self._source, tensors, strict=True)):
            check_tensor(spec, tensor)
            (by_kernel if self._has_kernel(number, tensor) else by_cast).append(number)
        moves = self._bind(by_kernel, [tensors[number] for number in by_kernel], arena)
        return _BoundSource(
            arena=arena, locations=[location_of(t) for t in tensors], moves=moves, by_cast=by_cast
        )

    def _has_kernel(self, number: int, tensor: AnyTensor) -> bool:
        """Whether a kernel can read the tensor where it lies and write it in the offered dtype."""
        have, want = dtype_of(self._names[number], tensor), self._offered.tensors[number].dtype
        return tensor.is_cpu and not tensor.is_neg() and (have is want or (have, want) in CASTS)

    def _bind(self, numbers: Sequence[int], tensors: Sequence[AnyTensor], arena: Memory) -> _BoundMoves:
        """The moves of some tensors. The memories have no owner: a run follows only on tensors that are there."""
        memories = [
            Memory(address=t.data_ptr(), size_bytes=extent_bytes(t), writable=False, owner=None)
            for t in tensors
        ]
        parts = [
            self._templates.freeze(dtype_of(self._names[n], t), *self._parts[n], strides_bytes(t))
            for n, t in zip(numbers, tensors, strict=True)
        ]
        rows = freeze_rows(parts, [self._offsets[number] for number in numbers])
        bound = self._kernels.bind_freeze(rows, memories, [arena], len(numbers))
        return _BoundMoves(
            numbers=np.array(numbers, dtype=np.int64), bound=bound, sizes_bytes=row_bytes(rows)
        )

    def _digest(self, numbers: Sequence[int], arena: Memory, threads: int, lanes: Lanes | None) -> None:
        """Digest tensors that are in the arena already."""
        if lanes is None or not numbers:
            return
        known = self._bound_digests
        if known is None or known.arena is not arena or known.numbers != numbers:
            self._bound_digests = known = self._bind_digests(numbers, arena)
        lanes[numbers] = known.run(threads)

    def _bind_digests(self, numbers: Sequence[int], arena: Memory) -> _BoundDigests:
        templates = [self._templates.digest(*self._parts[number]) for number in numbers]
        rows = digest_rows(templates, [self._offsets[number] for number in numbers])
        bound = self._kernels.bind_digest(rows, [arena], len(numbers))
        return _BoundDigests(numbers=numbers, arena=arena, bound=bound, sizes_bytes=row_bytes(rows))


def location_of(tensor: AnyTensor) -> TensorLocation:
    """Where and how a tensor lies now."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu


def unmoved(tensors: Sequence[AnyTensor], locations: Sequence[TensorLocation]) -> bool:
    """Whether every tensor is where and what it was. This is what Python does per tensor in a warm freeze."""
    try:
        for tensor, (address, shape, strides, dtype, cpu) in zip(tensors, locations, strict=True):
            if (
                tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.dtype is not dtype
                or tensor.is_cpu is not cpu
            ):
                return False
    except (AttributeError, RuntimeError):
        return False  # an object without bytes; binding again raises an error that names it
    return True
