"""Kept tensors: what a trainer leaves out on purpose, so that engines keep their own (`keep` of a publisher).

Owns which tensors of a source are left out, and the digests that the engine's must have. The engine's side compares them
(rounds/leader/leader).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from liveweight.devices.device import CPU
from liveweight.errors import ManifestMismatch, Refused
from liveweight.spec.manifest import KeptSet, Manifest, TensorSpec
from liveweight.trainer.sources.gathering_source import GatheringSource
from liveweight.trainer.sources.in_memory import StateDictSource
from liveweight.trainer.sources.merged_adapters import MergedSource
from liveweight.trainer.sources.one_shot_source import OneShotSource
from liveweight.trainer.sources.renamed_source import for_engines
from liveweight.trainer.sources.source import Source
from liveweight.trainer.sources.source_digests import digest_source
from liveweight.trainer.sources.stacked_experts import SplitSource, split_manifest, splits_for
from liveweight.trainer.sources.tensors import AnyTensor

Keep: TypeAlias = "Literal['frozen'] | Sequence[str] | Mapping[str, AnyTensor]"
"""`"frozen"`: parameters without a gradient; or patterns of names, as a shell's; or names with the tensors that engines must have."""
TITLE_CHARACTERS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPlan:
    """The names that a source leaves out, as engines know them, and what engines keep in their place; None: nothing."""

    left_out: frozenset[str] = frozenset()
    kept: KeptSet | None = None

    def reduce(self, source: Source, expected: Manifest) -> tuple[Source, Source]:
        """A source under the names that engines expect: all of it, and what is published of it."""
        if isinstance(source, OneShotSource):
            source.require(self._published(expected))
            return source, source
        whole = for_engines(source, expected)
        return whole, PartialSource(whole, self.left_out) if self.left_out else whole

    def _published(self, expected: Manifest) -> Manifest:
        """What engines expect, without what they keep."""
        kept = frozenset() if self.kept is None else frozenset(spec.name for spec in self.kept.tensors)
        return Manifest(tensors=tuple(spec for spec in expected if kept.isdisjoint(spec.names)))


NOTHING_KEPT = KeepPlan()


class PartialSource:
    """A source without some of its tensors. `frozen`: they must not be trained, since engines will never get them."""

    def __init__(self, source: Source, left_out: frozenset[str], *, frozen: bool = True) -> None:
        self._source, self._left_out, self._frozen = source, left_out, frozen

    @property
    def held(self) -> bool:
        """As the source's."""
        return self._source.held

    def manifest(self) -> Manifest:
        """The source's, without what is left out. ManifestInvalid if that is everything."""
        return Manifest(
            tensors=tuple(t for t in self._source.manifest() if self._left_out.isdisjoint(t.names))
        )

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """A pass of the source. Refuses a tensor that must be frozen and requires a gradient by now."""
        for name, tensor in self._source.tensors():
            if name not in self._left_out:
                yield name, tensor
            elif self._frozen and getattr(tensor, "requires_grad", False):
                raise Refused(
                    f"{name} is kept by the engines, and requires a gradient: make a new publisher without it in keep"
                )
            del tensor


def plan_keep(keep: Keep | None, source: Source, expected: Manifest | None) -> KeepPlan:
    """Which tensors are left out and kept, by engines that expect that. None: nobody says yet what a one-shot source has.

    Reads every tensor that is left out, for its digest; but not of a source whose passes are collectives, since other ranks take no
    part in this one. Raises Refused for a `keep` that fits nothing or contradicts itself.
    """
    if keep is None:
        return NOTHING_KEPT
    if expected is None:
        raise Refused("keep needs a model, or engines that say which tensors they have")
    if isinstance(source, OneShotSource):
        left_out = names_left_out(keep, (), {})
        return KeepPlan(left_out=left_out, kept=kept_set(keep, expected, (), _mapped(keep, expected), ()))
    source = for_engines(source, expected)
    own = source.manifest()
    left_out = names_left_out(keep, own.tensors, _gradients(source))
    digested = _mapped(keep, expected)
    if left_out and not isinstance(keep, Mapping) and not isinstance(source, GatheringSource):
        others = frozenset(name for spec in own if left_out.isdisjoint(spec.names) for name in spec.names)
        digested = _digested(PartialSource(source, others, frozen=False), expected)
    offered = PartialSource(source, left_out).manifest()
    split = split_manifest(offered, splits_for(offered, expected))
    return KeepPlan(left_out=left_out, kept=kept_set(keep, expected, own.tensors, digested, split.tensors))


def names_left_out(keep: Keep, own: Sequence[TensorSpec], gradients: Mapping[str, bool]) -> frozenset[str]:
    """All names of those of a source's tensors that are kept. `gradients`: for its parameters, whether training changes them."""
    if isinstance(keep, str):
        if keep != "frozen":
            raise Refused(f"keep is 'frozen', or a list of names or patterns, not {keep!r}")
        if not gradients:
            raise Refused(
                "keep='frozen' needs a torch module, whose parameters say whether they are trained: name them instead"
            )
        left = [spec for spec in own if gradients.get(spec.name) is False]
    else:
        left = [spec for spec in own if _pattern(spec, keep) is not None]
        for spec in left:
            if gradients.get(spec.name):
                raise Refused(
                    f"{spec.name} requires a gradient, and keep leaves it out ({_pattern(spec, keep)})"
                )
    if left and len(left) == len(own):
        raise Refused("keep leaves out every tensor: there is nothing to publish")
    return frozenset(name for spec in left for name in spec.names)


def kept_set(
    keep: Keep,
    expected: Manifest,
    own: Sequence[TensorSpec],
    digested: Mapping[str, TensorSpec],
    offered: Sequence[TensorSpec],
) -> KeptSet | None:
    """What engines keep: `digested`, by the engine's names, and what fits a pattern and is neither the source's nor offered."""
    expects = expected.by_name()
    filled = {expects[name].name for spec in offered for name in spec.names if name in expects}
    both = [spec for spec in expected if spec.name in digested and spec.name in filled]
    if both:
        raise Refused(
            f"{' and '.join(both[0].names)} are one tensor in the engine: keep all of its names or none"
        )
    kept = dict(digested)
    if not isinstance(keep, str | Mapping):
        names = [name for spec in (*expected, *own) for name in spec.names]
        for pattern in keep:
            if not any(_fits(name, pattern) for name in names):
                raise Refused(f"keep={pattern!r} fits no tensor of the engine, such as {names[0]}")
        for spec in expected:
            if _pattern(spec, keep) is not None and spec.name not in filled:
                kept.setdefault(spec.name, spec)
    title = keep if isinstance(keep, str) else ", ".join(keep)
    return KeptSet(name=title[:TITLE_CHARACTERS], tensors=tuple(kept.values())) if kept else None


def _pattern(spec: TensorSpec, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits one of a tensor's names."""
    return next((one for one in patterns if any(_fits(name, one) for name in spec.names)), None)


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _gradients(source: Source) -> dict[str, bool]:
    """For every parameter of a source, whether training changes it. Nothing is known of other tensors: buffers change without gradients."""
    if isinstance(source, MergedSource):
        return source.gradients()
    if not source.held:
        return {}
    return {
        name: bool(tensor.requires_grad)  # type: ignore[union-attr]
        for name, tensor in source.tensors()
        if type(tensor).__name__ != "HostTensor" and _is_parameter(tensor)
    }


def _is_parameter(tensor: AnyTensor) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter)


def _mapped(keep: Keep, expected: Manifest) -> dict[str, TensorSpec]:
    """The digests of tensors that were given with their names."""
    return _digested(StateDictSource(keep), expected) if isinstance(keep, Mapping) else {}


def _digested(source: Source, expected: Manifest) -> dict[str, TensorSpec]:
    """The digests that engines' tensors must have, by the engine's names. ManifestMismatch for tensors that engines do not have."""
    splits = splits_for(source.manifest(), expected)
    found = digest_source(SplitSource(source, splits) if splits else source, expected, CPU.choose().kernels)
    return by_expected_name(found, expected)


def by_expected_name(found: Manifest, expected: Manifest) -> dict[str, TensorSpec]:
    """Digested tensors by the engine's first name of each. ManifestMismatch for tensors that engines do not have."""
    expects = expected.by_name()
    strange = [spec.name for spec in found if spec.name not in expects]
    if strange:
        raise ManifestMismatch([f"{name} is in keep, and the engine has no such tensor" for name in strange])
    return {expects[spec.name].name: spec for spec in found}
