"""Live offers: a module whose parameters lie in an arena, so that ranks can read them where they are.

Owns the move into the arena and back, and the answer to "why not live?". The publisher decides when a live offer may be read and when the
optimiser may go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from liveweight.devices.copy_ranges import ROW_BYTES, ranges, run_shared, summed
from liveweight.devices.device import CPU, Device
from liveweight.devices.kernels import BoundDigest, Kernels
from liveweight.errors import LiveWeightError, Refused, Unavailable
from liveweight.plan.digests import plan_digests, row_bytes, split
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import Manifest
from liveweight.spec.row_table import Table
from liveweight.trainer.offers.freeze import offered_manifest
from liveweight.trainer.offers.freeze_tables import cut_columns
from liveweight.trainer.sources.in_memory import ModuleSource, as_source
from liveweight.trainer.sources.merged_adapters import MergedSource
from liveweight.trainer.sources.module_walker import ModuleWalker
from liveweight.trainer.sources.source import Source, whole_pass
from liveweight.trainer.sources.stacked_experts import split_manifest, splits_for
from liveweight.trainer.sources.tensors import AnyTensor, extent_bytes, view
from liveweight.trainer.sources.tied_tensors import UniqueTensors, find_unique_tensors
from liveweight.transports.port import Arena

if TYPE_CHECKING:
    import torch


class SharedModule:
    """A module that lies in an arena. It owns the arena: `close` moves the module back to private memory and closes the arena."""

    def __init__(
        self, module: torch.nn.Module, arena: Arena, layout: Layout, residents: Sequence[list[torch.Tensor]]
    ) -> None:
        """Called by `share_module`. `residents` are, for each tensor of the layout, the objects that lie there."""
        self.module, self.arena, self.layout = module, arena, layout
        self.manifest = layout.manifest()
        self.names = [spec.name for spec in self.manifest]
        self.addresses = [arena.memory.address + placement.offset_bytes for placement in layout.placements]
        """Where each tensor of the manifest lies, as long as nobody moves it."""
        self.closed = False
        self._residents = residents
        self._bound_digest: tuple[Kernels, Layout, BoundDigest, Table] | None = None

    def holds(self, tensors: Sequence[AnyTensor]) -> bool:
        """Whether these are, one by one, the tensors that lie in the arena, each in one run.

        Runs over many thousand tensors before every offer, so each is touched once, and no tuple (such as its shape) is made.
        """
        return len(tensors) == len(self.addresses) and all(
            [  # noqa: C419 - a list is faster here
                tensor.data_ptr() == address and tensor.is_contiguous()
                for tensor, address in zip(tensors, self.addresses, strict=True)
            ]
        )

    def digest(self, kernels: Kernels, threads: int, layout: Layout) -> Lanes:
        """The digests of what lies in the arena now, by a layout of it: whole tensors, or their parts. The digest kernel is bound once."""
        known = self._bound_digest
        if known is None or known[0] is not kernels or known[1] is not layout:
            rows = cut_columns(split(plan_digests(layout).rows, ROW_BYTES), ROW_BYTES)
            bound = kernels.bind_digest(rows, [self.arena.memory], len(layout.placements))
            self._bound_digest = known = kernels, layout, bound, row_bytes(rows)
        _, _, bound, sizes_bytes = known
        shares = ranges(sizes_bytes, threads)
        parts = run_shared(bound.run, shares, threads)
        return summed(parts, len(layout.placements))

    def close(self) -> None:
        """Copy what still lies in the arena back to private memory, keep ties, and close the arena. May be called twice."""
        if self.closed:
            return
        for address, tensors in zip(self.addresses, self._residents, strict=True):
            staying = [tensor for tensor in tensors if tensor.data_ptr() == address]
            if staying:
                private = staying[0].detach().clone()
                for tensor in staying:
                    tensor.data = private
        self.closed = True
        self._residents, self._bound_digest = [], None
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def share_module(
    module: torch.nn.Module, allocate: Callable[[int], Arena], device: str = "cpu"
) -> SharedModule:
    """Move a module's parameters and persistent buffers into an arena: same objects, values, gradients; contiguous; tied ones once.

    An optimiser goes on with the parameters it has. One that keeps the parameters' memory itself (flattened buffers) must be made after.
    Called between steps, never between forward and backward. On failure the module is as it was. `device` is where the arena is.
    """
    module_walker = ModuleWalker.of(module)
    tensors = module_walker.tensors()
    unique_tensors = find_unique_tensors(module_walker.names, tensors)
    residents = _residents(unique_tensors, tensors)
    _check_movable(unique_tensors.manifest, residents, device)
    layout = packed(unique_tensors.manifest.tensors)
    arena = allocate(layout.memories_bytes[0])
    try:
        _move(layout, arena, residents)
    except BaseException:
        arena.close()
        raise
    return SharedModule(module, arena, layout, residents)


def why_not_live(source: Source, expected: Manifest, shared: SharedModule | None) -> str | None:
    """The reason, in words, why ranks cannot read this source where it lies; None if they can."""
    if isinstance(source, MergedSource):
        return "adapters are merged into new tensors for every version"
    if not isinstance(source, ModuleSource):
        return "the source is not a torch module"
    if shared is None:
        return "the module lies in private memory; share_module moves it"
    if shared.module is not source.module:
        return "another module was shared"
    offered = split_manifest(shared.manifest, splits_for(shared.manifest, expected))
    return _other_dtypes(offered, expected) or moved_since(source, shared)


def moved_since(source: Source, shared: SharedModule) -> str | None:
    """Why a live offer is no longer possible: a tensor has moved since `share_module`. Checked before every live offer. None: none."""
    if shared.closed:
        return "the module was moved back to private memory"
    try:
        tensors = whole_pass(source, shared.names)
        return None if shared.holds(tensors) else _first(_strays(tensors, shared))
    except LiveWeightError as error:
        return str(error)


def source_of(model: object) -> tuple[Source, SharedModule | None]:
    """Where weights come from, and the shared module that they lie in, if it is one."""
    if isinstance(model, SharedModule):
        return ModuleSource(model.module), model
    return as_source(model), None


def source_device(given: Device | None, shared: SharedModule | None) -> Device:
    """Where offers lie: on the given device, else where the module was shared, else in host memory. Refused where two contradict."""
    if shared is None:
        return CPU if given is None else given
    home = shared.arena.device
    if given is not None and given.identity != home.identity:
        raise Refused(f"the module was shared on {home.name}, and the publisher's device is {given.name}")
    return home


def live_digest(shared: SharedModule, kernels: Kernels, threads: int, layout: Layout | None = None) -> Lanes:
    """The digests of the parameters as they are now, in the order of the layout that they are offered by: the module's, or its parts'."""
    return shared.digest(kernels, threads, shared.layout if layout is None else layout)


def _residents(unique_tensors: UniqueTensors, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each tensor of the manifest the distinct objects that are it. None for an empty one, which lies nowhere."""
    owned = {owner: [tensors[owner]] for owner in unique_tensors.owners}
    for tie in unique_tensors.ties:
        if all(tensors[tie.alias] is not other for other in owned[tie.owner]):
            owned[tie.owner].append(tensors[tie.alias])
    return [group if group[0].numel() else [] for group in owned.values()]


def _check_movable(manifest: Manifest, residents: Sequence[list[torch.Tensor]], device: str) -> None:
    """Refuse what cannot be moved without being changed: other devices, and tensors that share a part of their memory."""
    spans = []
    for spec, group in zip(manifest, residents, strict=True):
        for tensor in group[:1]:
            if str(tensor.device) != device:
                raise Refused(f"{spec.name} is on {tensor.device}, and the arena would be on {device}")
            spans.append((tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor), spec.name))
    for (_, end, name), (start, _, other) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise Refused(f"{name} and {other} lie across each other in memory, and would not after a move")


def _move(layout: Layout, arena: Arena, residents: Sequence[list[torch.Tensor]]) -> None:
    """Copy all values first; then move all tensors to the new memory, or none."""
    raw = arena.memory.tensor()
    views = [view(raw, p, spec) for p, spec in zip(layout.placements, layout.tensors, strict=True)]
    for place, group in zip(views, residents, strict=True):
        for tensor in group[:1]:
            place.copy_(tensor.detach())
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for spec, place, group in zip(layout.tensors, views, residents, strict=True):
        for tensor in group:
            before = tensor.data
            try:
                tensor.data = place
            except Exception as error:
                for other, memory in moved:
                    other.data = memory
                raise Unavailable(f"{spec.name} cannot be moved: {error}") from error
            moved.append((tensor, before))


def _other_dtypes(have: Manifest, expected: Manifest) -> str | None:
    """Which tensors would have to be cast for the engine."""
    wanted = offered_manifest(have, expected)
    return _first(
        f"{mine.name} is {mine.dtype.value} and the engine expects {theirs.dtype.value}"
        for mine, theirs in zip(have, wanted, strict=True)
        if mine.dtype is not theirs.dtype
    )


def _strays(tensors: Sequence[AnyTensor], shared: SharedModule) -> Iterator[str]:
    """Which tensors are no longer where they were put."""
    for address, spec, tensor in zip(shared.addresses, shared.manifest, tensors, strict=True):
        if tensor.numel() == 0 or (
            tensor.data_ptr() == address and tensor.shape == spec.shape and tensor.is_contiguous()
        ):
            continue
        now = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
        yield f"{spec.name} is no longer where share_module put it (now {now})"


def _first(reasons: Iterator[str]) -> str | None:
    """The first reason, and how many more there are like it."""
    first = next(reasons, None)
    more = sum(1 for _ in reasons)
    return f"{first}, and {more} more like it" if more else first
