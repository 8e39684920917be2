"""vLLM's model as a rank's weights: a version is staged in the host's arenas (workers/host_arenas); a swap installs it (workers/install).

Owns which version lies where. vLLM keeps weights in layouts of its own (fused, sliced, packed), so full tensors are kept as well: those of
the installed version, and those of the version before, for undo. The first version before is the checkpoint that vLLM was started from.
"""

from __future__ import annotations

import itertools
import mmap
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from liveweight.devices.memory import Memory
from liveweight.errors import DigestMismatch, Torn, WrongState
from liveweight.integrations.vllm.workers.host_arenas import HostArenas
from liveweight.integrations.vllm.workers.read_back import ModelReadBack
from liveweight.spec.layout import ALIGNMENT_BYTES, Layout, Placement, align, contiguous_strides
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import whole
from liveweight.worker.targets.target import ReadBack

if TYPE_CHECKING:
    import torch

Named: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """The checkpoint that vLLM was started from. Its tensors are in files."""


@dataclass(frozen=True, slots=True)
class InArena:
    """A version whose tensors lie in that arena."""

    number: int


Content: TypeAlias = StartCheckpoint | InArena


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """What one rank of a host stages: its placements, which are adjacent, and their byte range."""

    layout: Layout
    first_byte: int
    last_byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShares:
    """How the ranks of a host divide a version: every tensor belongs to one rank, and all tensors lie in one arena."""

    size_bytes: int
    offsets: dict[str, int]
    ranks: tuple[HostShare, ...]


def divide(manifest: Manifest, ranks: int) -> HostShares:
    """Assign whole tensors, the largest first, to the rank with the fewest bytes so far. Every rank computes the same."""
    owned: list[list[TensorSpec]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for spec in sorted(manifest, key=lambda spec: (-spec.size_bytes, spec.name)):
        least = loads.index(min(loads))
        owned[least].append(spec)
        loads[least] += spec.size_bytes
    ordered = [spec for specs in owned for spec in specs]
    ends = itertools.accumulate((align(s.size_bytes, ALIGNMENT_BYTES) for s in ordered), initial=0)
    offsets = dict(zip((spec.name for spec in ordered), ends, strict=False))
    total = sum(align(spec.size_bytes, ALIGNMENT_BYTES) for spec in ordered)
    return HostShares(
        size_bytes=max(total, 1),
        offsets=offsets,
        ranks=tuple(_share(specs, offsets, max(total, 1)) for specs in owned),
    )


def _share(specs: Sequence[TensorSpec], offsets: dict[str, int], size_bytes: int) -> HostShare:
    placements = tuple(
        Placement(
            name=spec.name,
            region=whole(spec.shape),
            memory=0,
            offset_bytes=offsets[spec.name],
            strides_bytes=contiguous_strides(spec.shape, spec.dtype),
        )
        for spec in specs
    )
    layout = Layout(tensors=tuple(specs), memories_bytes=(size_bytes,), placements=placements)
    ends = [offsets[spec.name] + spec.size_bytes for spec in specs]
    return HostShare(
        layout=layout,
        first_byte=min((offsets[s.name] for s in specs), default=0),
        last_byte=max(ends, default=0),
    )


class VllmTarget:
    """Implements the port of worker/targets/target.

    `load` puts all tensors of a version into the model; `restore` follows a `load` that raised; `learn` is called with the
    installed tensors before another version is staged.
    """

    def __init__(
        self,
        manifest: Manifest,
        arenas: HostArenas,
        shares: HostShares,
        *,
        local_rank: int,
        load: Callable[[Named], None],
        restore: Callable[[], None],
        start: Callable[[], Named],
        learn: Callable[[Callable[[str], torch.Tensor]], None],
        reading: ModelReadBack,
    ) -> None:
        self._manifest, self._arenas, self._shares = manifest, arenas, shares
        self._own = shares.ranks[local_rank]
        self._load, self._restore, self._start = load, restore, start
        self._learn, self._reading = learn, reading
        self._sides: tuple[Content, Content] = (StartCheckpoint(), InArena(0))
        self.reads_back = False
        """Whether a swap ends with a comparison of the model with the installed tensors."""
        self._unread = len(manifest.tensors)

    @property
    def layout(self) -> Layout:
        """What this rank stages, and where in an arena."""
        return self._own.layout

    def live(self, tensors: Collection[str] | None = None) -> Sequence[Memory]:
        """The full tensors of the installed version. For vLLM's own layouts see `read_back`. Those of the checkpoint that vLLM was started
        from are read from its files, into memory that is freed with the answer."""
        match self._sides[0]:
            case InArena(number=number):
                return (self._arenas.memory(number),)
            case StartCheckpoint():
                return (self._read_start(tensors),)

    def _read_start(self, tensors: Collection[str] | None) -> Memory:
        """The start checkpoint's tensors, of this rank's share, where they would lie in an arena. Pages of others are never touched."""
        pages = Memory.from_buffer(mmap.mmap(-1, self._shares.size_bytes))
        owned = self._own.layout.specs()
        into = {name: tensor for name, tensor in self._views(pages.tensor()) if name in owned}
        for name, tensor in self._start():
            if name in into and (tensors is None or name in tensors):
                into[name].copy_(tensor)
        return pages

    def shadow(self) -> Sequence[Memory]:
        """The arena that does not hold the installed version. The version before is lost: undo is not possible any more."""
        live, _ = self._sides
        number = 0
        if isinstance(live, InArena):
            number = 1 - live.number
            self._learn(dict(self._in_arena(live.number)).__getitem__)
        self._reading.prepare()  # here, and not while vLLM is paused
        self._arenas.fill(number, self._own.first_byte, self._own.last_byte)
        self._sides = (live, InArena(number))
        return (self._arenas.memory(number),)

    def keep(self, tensors: Collection[str]) -> None:
        """Copy these installed tensors into the shadow: the next swap loads them again, unchanged."""
        live, shadow = self._sides
        if not isinstance(shadow, InArena):
            raise WrongState("without a shadow", "keeping tensors")
        kept, into = set(tensors), dict(self._in_arena(shadow.number))
        for name, tensor in self._tensors(live):
            if name in kept:
                into[name].copy_(tensor)

    def swap(self) -> None:
        """Install the staged version; swapping again undoes it. On failure, reinstall the version before; Torn if that fails, too."""
        live, shadow = self._sides
        try:
            self._load(self._tensors(shadow))
            self._unread = self._compare_model(shadow)
        except Exception as error:
            self._install_again(live, error)
            raise
        self._sides = (shadow, live)

    def _compare_model(self, installed: Content) -> int:
        """Compare the model with the installed tensors, if `reads_back`. Returns how many tensors were not compared. DigestMismatch names
        those that differ."""
        if not self.reads_back or isinstance(installed, StartCheckpoint):
            return len(self._manifest.tensors)
        found = self._read(installed)
        if found.differing:
            raise DigestMismatch(found.differing, "vLLM's model")
        return len(found.unread)

    def _install_again(self, live: Content, cause: Exception) -> None:
        try:
            self._restore()
            self._load(self._tensors(live))
        except Exception as error:
            raise Torn(
                f"installing failed ({type(cause).__name__}: {cause}), and so did installing the version before: {error}"
            ) from error

    def _tensors(self, content: Content) -> Named:
        match content:
            case StartCheckpoint():
                return self._start()
            case InArena(number=number):
                return self._in_arena(number)

    def _in_arena(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the arena, layer after layer: vLLM buffers a layer's tensors until it has all of them."""
        return self._views(self._arenas.memory(number).tensor())

    def _views(self, pages: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for spec in in_layers(self._manifest):
            offset = self._shares.offsets[spec.name]
            part = pages[offset : offset + spec.size_bytes]
            yield spec.name, part.view(getattr(torch, spec.dtype.value)).view(spec.shape)

    def read_back(self) -> ReadBack | None:
        """See Target. If the model packs its weights, few of them can be read."""
        match self._sides[0]:
            case InArena() as installed:
                return self._read(installed)
            case StartCheckpoint():
                return None

    def _read(self, installed: InArena) -> ReadBack:
        return self._reading.beside(dict(self._in_arena(installed.number)).__getitem__)

    @property
    def unread(self) -> int:
        """See Target. A round verifies the full tensors in the arena, not the model's own."""
        return self._unread

    def release_shadow(self) -> None:
        """Arenas are kept across rounds."""


def in_layers(manifest: Manifest) -> list[TensorSpec]:
    """The tensors by the first number in their names, which is their layer's; what has none comes first."""
    return sorted(manifest, key=layer_of)


def layer_of(spec: TensorSpec) -> tuple[str, int]:
    """The layer that a tensor belongs to, by its name."""
    prefix, number, _ = re.match(r"(.*?)(?:\.(\d+)\.(.*))?$", spec.name).groups()  # type: ignore[union-attr]
    return ("", -1) if number is None else (prefix, int(number))
