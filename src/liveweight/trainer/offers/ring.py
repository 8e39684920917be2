"""Ring offers: a source's tensors packed where they lie, bucket by bucket, for the ranks that ask; no copy of the whole is made.

Owns the page that revokes an offer, and the packing source: where the tensors lie now. While an offer stands, training waits: the tensors
must not change before `end` has returned. The transport source packs them and hands the buckets over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import Unavailable
from liveweight.plan.freezes import CASTS
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout, Placement
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import Region, counts, whole
from liveweight.trainer.offers.freeze import TensorLocation, location_of, unmoved
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.source import Source, check_tensor, whole_pass
from liveweight.trainer.sources.tensors import AnyTensor, bytes_of, extent_bytes, strides_bytes, torch_dtypes
from liveweight.transports.packing_source import PackingSource, Put, RingCounts, RingSettings
from liveweight.transports.port import Arena, TransportSource
from liveweight.wire.messages.values import Offer


class PackedRing(Protocol):
    """The ring of a transport source, as offers use it."""

    def end(self, layout: str) -> None:
        """Pack no more; when it returns, nothing of the packing source is read."""

    def digests(self, layout: str) -> Lanes:
        """The digests of the offered tensors."""

    def counts(self, layout: str) -> RingCounts:
        """What was packed for whom."""


class RingTransportSource(TransportSource, Protocol):
    """The transport source of a mode that has ring offers."""

    def ring(self, settings: RingSettings | None = None) -> PackedRing:
        """The ring itself."""

    def offer_packing_source(
        self, packing_source: PackingSource, arenas: Sequence[Arena], settings: RingSettings | None = None
    ) -> Offer:
        """Let ranks have this packing source packed for them; the arenas carry the generation."""


class RingOffers:
    """The ring offers of one source, one at a time. Called from the thread that offers; `digests` from the round's."""

    def __init__(
        self, source: Source, own: Manifest, offered: Layout, kernels: Kernels, settings: RingSettings
    ) -> None:
        self._source, self._own, self._offered = source, own, offered
        self._kernels, self._settings = kernels, settings
        self._names = [spec.name for spec in own]
        self._arena: Arena | None = None
        self._current: tuple[RingTransportSource, PackingSource] | None = None
        self._digest = False
        self._locations: Sequence[TensorLocation] = []

    def why_not(self) -> str | None:
        """Why this source cannot be packed into a ring, in words; None if it can."""
        if self._source.held:
            return None
        return "the source makes its tensors one by one, and a ring is packed in the order of each rank"

    def make(self, transport_source: RingTransportSource, *, digest: bool) -> Offer:
        """Offer the source's current values."""
        tensors = whole_pass(self._source, self._names)
        packing_source, self._digest = self._packing_source(tensors), digest
        if self._arena is None:
            self._arena = transport_source.allocate(0, "ring")
        self._current = transport_source, packing_source
        return transport_source.offer_packing_source(packing_source, [self._arena], self._settings)

    def digests(self) -> Lanes | None:
        """The digests of what was packed, if they were asked for. Once ranks have staged, before `end`."""
        if self._current is None or not self._digest:
            return None
        transport_source, _ = self._current
        return transport_source.ring(self._settings).digests(self._offered.fingerprint)

    def end(self) -> RingCounts | None:
        """The parameters may change from now on: whoever still reads is revoked. What the ring did, if there was an offer."""
        if self._current is None or self._arena is None:
            return None
        transport_source, _ = self._current
        ring = transport_source.ring(self._settings)
        self._arena.raise_generation()
        ring.end(self._offered.fingerprint)
        return ring.counts(self._offered.fingerprint)

    def close(self) -> None:
        """Withdraw the offer and release the tensors."""
        if self._current is not None:
            self._current[0].withdraw(self._offered)
            self._current = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _packing_source(self, tensors: Sequence[AnyTensor]) -> PackingSource:
        """The packing source of the offer before, if no tensor has moved: what ranks bound to it stays valid."""
        before = None if self._current is None else self._current[1]
        if before is not None and unmoved(tensors, self._locations):
            return before
        for spec, tensor in zip(self._own, tensors, strict=True):
            check_tensor(spec, tensor)
        self._locations = [location_of(tensor) for tensor in tensors]
        own = [n for n, tensor in enumerate(tensors) if self._has_kernel(n, tensor)]
        others = set(range(len(tensors))) - set(own)
        return PackingSource(
            offered=self._offered,
            held=_where([self._own.tensors[n] for n in own], [tensors[n] for n in own]),
            memories=[_memory(tensors[n]) for n in own],
            kernels=self._kernels,
            foreign={self._names[n]: _put(self._offered.tensors[n], tensors[n]) for n in sorted(others)},
        )

    def _has_kernel(self, number: int, tensor: AnyTensor) -> bool:
        have, want = self._own.tensors[number].dtype, self._offered.tensors[number].dtype
        return tensor.is_cpu and not tensor.is_neg() and (have is want or (have, want) in CASTS)


def _where(specs: Sequence[TensorSpec], tensors: Sequence[AnyTensor]) -> Layout:
    """Whole tensors where they lie, each in a memory of its own."""
    placements = [
        Placement(
            name=spec.name,
            region=whole(spec.shape),
            memory=number,
            offset_bytes=0,
            strides_bytes=strides_bytes(tensor),
        )
        for number, (spec, tensor) in enumerate(zip(specs, tensors, strict=True))
    ]
    sizes = tuple(extent_bytes(tensor) for tensor in tensors)
    return Layout(tensors=tuple(specs), memories_bytes=sizes, placements=tuple(placements))


def _memory(tensor: AnyTensor) -> Memory:
    """What a tensor covers; it is held as long as the packing source is."""
    return Memory(
        address=tensor.data_ptr(), size_bytes=extent_bytes(tensor), writable=False, owner=_detached(tensor)
    )


def _detached(tensor: AnyTensor) -> AnyTensor:
    return tensor if isinstance(tensor, HostTensor) else tensor.detach()


def _put(spec: TensorSpec, tensor: AnyTensor) -> Put:
    """How a tensor that kernels cannot read, on a device for instance, is packed: by torch, or by NumPy."""
    detached = _detached(tensor)

    def put(parcel: Placement, memory: Memory) -> None:
        shape = counts(parcel.region)
        first, size = parcel.offset_bytes, math.prod(shape) * spec.dtype.size_bytes
        try:
            if isinstance(detached, HostTensor):
                memory.bytes()[first : first + size] = _region(detached, parcel.region).cast(spec.dtype)
                return
            chosen = tuple(slice(span.start, span.last + 1, span.step) for span in parcel.region)
            part = bytes_of(memory)[first : first + size].view(torch_dtypes()[spec.dtype])
            part.view(shape).copy_(detached[chosen])
        except Exception as error:
            raise Unavailable(f"{spec.name} could not be packed from {detached.device}: {error}") from error

    return put


def _region(tensor: HostTensor, region: Region) -> HostTensor:
    start = sum(span.start * stride for span, stride in zip(region, tensor.strides, strict=True))
    return dataclasses.replace(
        tensor,
        address=tensor.address + start * tensor.itemsize,
        shape=counts(region),
        strides=tuple(span.step * stride for span, stride in zip(region, tensor.strides, strict=True)),
    )
