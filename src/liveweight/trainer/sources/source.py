"""The port of a source: where a version's tensors come from.

Two channels, metadata and iteration, that must agree; this file compares them. Offers are made of the
tensors in trainer/offers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NoReturn, Protocol, runtime_checkable

from liveweight.errors import LiveWeightError, ManifestInvalid, Unavailable
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.trainer.sources.tensors import AnyTensor, spec_of


@runtime_checkable
class Source(Protocol):
    """Full tensors by name. Called from the thread that offers; never while another pass is under way."""

    @property
    def held(self) -> bool:
        """Whether the tensors exist all at once and outlive a pass. If not, each is read before the next is asked for."""

    def manifest(self) -> Manifest:
        """Names, the source's own dtypes, full shapes, aliases; no digests. Touches no bytes."""

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """One pass over the current values, in the manifest's order, aliases left out. Any strides, any device."""


def one_pass(source: Source, names: Sequence[str]) -> Iterator[AnyTensor]:
    """The source's tensors, one per name. Compares the names; dtype and shape are for `check_tensor`.

    What the source raises comes out as Unavailable with the name of the tensor that was asked for. No tensor is kept.
    """
    position = 0
    try:
        for name, tensor in source.tensors():
            if position == len(names) or name != names[position]:
                _refuse(name, names, position)
            yield tensor
            del tensor
            position += 1
    except LiveWeightError:
        raise
    except Exception as error:
        raise _failed(names, position, error) from error
    if position < len(names):
        _refuse(None, names, position)


def whole_pass(source: Source, names: Sequence[str]) -> list[AnyTensor]:
    """The same over a held source, all at once: a tenth of the time per tensor."""
    named: list[str] = []
    tensors: list[AnyTensor] = []
    try:
        for name, tensor in source.tensors():
            named.append(name)
            tensors.append(tensor)
    except LiveWeightError:
        raise
    except Exception as error:
        raise _failed(names, len(tensors), error) from error
    if named != names:
        for position, (given, wanted) in enumerate(itertools.zip_longest(named, names)):
            if given != wanted:
                _refuse(given, names, position)
    return tensors


def check_tensor(spec: TensorSpec, tensor: AnyTensor) -> None:
    """Refuse a tensor that is not what the manifest says, or whose bytes cannot be read."""
    given = spec_of(spec.name, tensor)
    if (given.dtype, given.shape) != (spec.dtype, spec.shape):
        raise ManifestInvalid(
            f"{spec.name}: the source's manifest says {spec.describe()}, its tensor is {given.describe()}"
        )


def _refuse(name: str | None, names: Sequence[str], position: int) -> NoReturn:
    """Say how a name that came, or None for the end, differs from the manifest."""
    if name is None:
        raise ManifestInvalid(f"the source ended before {names[position]}, which its manifest lists")
    if name not in names:
        raise ManifestInvalid(f"the source gave {name}, which its manifest does not list")
    if name in names[:position]:
        raise ManifestInvalid(f"the source gave {name} twice")
    raise ManifestInvalid(f"the source gave {name} where its manifest lists {names[position]}")


def _failed(names: Sequence[str], position: int, error: Exception) -> Unavailable:
    asked = names[position] if position < len(names) else "its end"
    return Unavailable(f"the source failed when it was asked for {asked}: {type(error).__name__}: {error}")
