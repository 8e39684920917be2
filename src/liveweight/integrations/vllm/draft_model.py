"""The draft model beside the main one: one version holds the tensors of both, the draft's under a prefix.

Owns the names. vLLM hands a backend the draft model when an update of the draft begins; a trainer begins one in its handshake. From then
on every swap installs both models, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from msgspec.structs import replace

from liveweight.spec.manifest import Manifest, OptionalGroup, TensorSpec

GROUP = "draft"
PREFIX = "draft."
METHOD = "draft_model"
"""vLLM's speculative method whose draft model has a checkpoint of its own, and shares nothing with the main model."""

Tensor = TypeVar("Tensor")


def with_draft(main: Manifest, draft: Manifest | None) -> Manifest:
    """The tensors of both."""
    if draft is None:
        return main
    return Manifest(tensors=(*main, *(_prefixed(spec) for spec in draft)))


def _prefixed(spec: TensorSpec) -> TensorSpec:
    aliases = tuple(PREFIX + alias for alias in spec.aliases)
    return replace(spec, name=PREFIX + spec.name, aliases=aliases)


def optional(manifest: Manifest) -> tuple[OptionalGroup, ...]:
    """A trainer without a draft model leaves its tensors out, and vLLM keeps the draft that it has: a draft only guesses."""
    names = tuple(name for spec in manifest for name in spec.names if name.startswith(PREFIX))
    return (OptionalGroup(name=GROUP, tensors=names),) if names else ()


def of_draft(manifest: Manifest) -> bool:
    """Whether the manifest has tensors of the draft model."""
    return any(spec.name.startswith(PREFIX) for spec in manifest)


def prefixed(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The draft's own tensors, as a version has them."""
    return ((PREFIX + name, tensor) for name, tensor in tensors)


def load_both(
    tensors: Iterable[tuple[str, Tensor]],
    main: Callable[[Iterable[tuple[str, Tensor]]], None],
    draft: Callable[[Iterable[tuple[str, Tensor]]], None] | None,
) -> None:
    """Load a version's tensors into the models that they belong to. Skips the draft's tensors if vLLM did not hand the draft model over."""
    kept: list[tuple[str, Tensor]] = []

    def mains() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                kept.append((name.removeprefix(PREFIX), tensor))
            else:
                yield name, tensor

    rest = mains()
    main(rest)
    for _ in rest:  # a loader may have seen enough before the end
        pass
    if draft is not None and kept:
        draft(kept)
