"""Experts that a module holds in one tensor, offered one by one, as checkpoints name them.

From its fifth release on, transformers keeps the experts of a layer stacked: `experts.gate_up_proj` is [experts, 2 x inner, hidden] with
the gate's rows above the up projection's, `experts.down_proj` is [experts, hidden, inner]. Checkpoints, and engines that serve them, have
`experts.0.gate_proj.weight` and so on. The parts are views of the stacked tensor: nothing is copied. Which of the two an engine wants,
its manifest says; what both sides call the same is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from liveweight.spec.layout import Layout, Placement, contiguous_strides
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.region import whole
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.tensors import AnyTensor

STACKED: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The last component of a stacked tensor's name, and what an expert's share of it is called: equal parts of its rows, in order."""
EXPERTS = "experts"

Splits: TypeAlias = Mapping[str, tuple[TensorSpec, ...]]
"""By the name of a stacked tensor: its parts, expert by expert, in the order in which they lie in it."""


def splits_for(have: Manifest, expected: Manifest) -> Splits:
    """The stacked tensors of a source whose parts the engine expects under names of their own."""
    wanted = expected.by_name()
    found = ((spec.name, parts_of(spec)) for spec in have if spec.name not in wanted and not spec.aliases)
    return {name: parts for name, parts in found if parts and all(part.name in wanted for part in parts)}


def checkpoint_manifest(manifest: Manifest) -> Manifest:
    """The same tensors as a checkpoint has them: every stack of experts in its parts. For a source without engines."""
    return split_manifest(
        manifest, {spec.name: parts for spec in manifest if not spec.aliases and (parts := parts_of(spec))}
    )


def split_manifest(manifest: Manifest, splits: Splits) -> Manifest:
    """The same tensors, parts in place of what is stacked."""
    return Manifest(tensors=_split(manifest.tensors, splits)) if splits else manifest


def split_layout(layout: Layout, splits: Splits) -> Layout:
    """Where the parts lie, in the memories of a layout that has every tensor whole and contiguous."""
    placements: list[Placement] = []
    for placement in layout.placements:
        offset = placement.offset_bytes
        for part in splits.get(placement.name, ()):
            placements.append(
                Placement(
                    name=part.name,
                    region=whole(part.shape),
                    memory=placement.memory,
                    offset_bytes=offset,
                    strides_bytes=contiguous_strides(part.shape, part.dtype),
                )
            )
            offset += part.size_bytes
        if placement.name not in splits:
            placements.append(placement)
    tensors = _split(layout.tensors, splits)
    return Layout(tensors=tensors, memories_bytes=layout.memories_bytes, placements=tuple(placements))


class SplitSource:
    """A source whose stacked tensors are given out in parts."""

    def __init__(self, source: Source, splits: Splits) -> None:
        self._source, self._splits = source, splits

    @property
    def held(self) -> bool:
        """As the source's: a part lives as long as what it is a view of."""
        return self._source.held

    def manifest(self) -> Manifest:
        """The source's, with the parts."""
        return split_manifest(self._source.manifest(), self._splits)

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """A pass of the source; the parts of a tensor are given out before the next one is asked for."""
        for name, tensor in self._source.tensors():
            parts = self._splits.get(name)
            if parts is None:
                yield name, tensor
                continue
            for part, view in zip(parts, views_of(tensor, parts[0].shape[0]), strict=True):
                yield part.name, view


def _split(tensors: tuple[TensorSpec, ...], splits: Splits) -> tuple[TensorSpec, ...]:
    return tuple(part for spec in tensors for part in splits.get(spec.name, (spec,)))


def parts_of(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """What a tensor of that name and shape is made of; nothing where it is no stack of experts."""
    *above, parent, last = ("", *spec.name.rsplit(".", 2))[-3:]
    kinds = STACKED.get(last, ())
    if (
        parent != EXPERTS
        or not kinds
        or len(spec.shape) != 3
        or not spec.elements
        or spec.shape[1] % len(kinds)
    ):
        return ()
    prefix = ".".join([*filter(None, above), EXPERTS])
    experts, rows, columns = spec.shape
    return tuple(
        TensorSpec(
            name=f"{prefix}.{expert}.{kind}.weight", dtype=spec.dtype, shape=(rows // len(kinds), columns)
        )
        for expert in range(experts)
        for kind in kinds
    )


def views_of(stacked: AnyTensor, rows: int) -> Iterator[AnyTensor]:
    """Its parts of so many rows each: views, whatever its strides."""
    if isinstance(stacked, HostTensor):
        yield from stacked.parts(rows)
        return
    for expert in stacked.detach().unbind(0):
        yield from (expert.narrow(0, start, rows) for start in range(0, expert.shape[0], rows))
