"""Compares what vLLM's model holds with the installed tensors, bit by bit, where a layer keeps weights as they were loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from liveweight.spec.manifest import Manifest
from liveweight.worker.targets.target import ReadBack

if TYPE_CHECKING:
    import torch


class ViewPart(Protocol):
    """A part of a tensor's memory, which can be taken of any tensor of the same layout."""

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of another tensor of the same layout."""


class TensorPlace(Protocol):
    """Where a part of a tensor lies in the model."""

    @property
    def tensor(self) -> str:
        """Its name."""

    @property
    def source(self) -> ViewPart:
        """Which part of it."""

    def held(self) -> torch.Tensor | None:
        """What the model holds there; None where that cannot be read."""


class ModelReadBack:
    """Reads one model back. Learns where tensors lie at the first use, or ahead of that by `learn`."""

    def __init__(self, manifest: Manifest, learn: Callable[[], Iterable[TensorPlace]]) -> None:
        self._manifest, self._learn = manifest, learn
        self._places: dict[str, list[TensorPlace]] | None = None

    def prepare(self) -> None:
        """Learn where tensors lie."""
        self._known()

    def beside(self, tensor: Callable[[str], torch.Tensor]) -> ReadBack:
        """Compare the model with these tensors."""
        found = {spec.name: self._differs(spec.name, tensor) for spec in self._manifest}
        return ReadBack(
            differing=tuple(name for name, differs in found.items() if differs),
            unread=tuple(name for name, differs in found.items() if differs is None),
        )

    def _differs(self, name: str, tensor: Callable[[str], torch.Tensor]) -> bool | None:
        """None where it cannot be read, or not all of it."""
        held = [(place, place.held()) for place in self._known().get(name, ())]
        known = [(place, live) for place, live in held if live is not None]
        if any(not _same(live, place.source.within(tensor(name))) for place, live in known):
            return True
        return False if known and len(known) == len(held) else None

    def _known(self) -> dict[str, list[TensorPlace]]:
        if self._places is None:
            places: dict[str, list[TensorPlace]] = {}
            for place in self._learn():
                places.setdefault(place.tensor, []).append(place)
            self._places = places
        return self._places


def _same(live: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bitwise equality, also of NaNs."""
    import torch

    units = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[live.element_size()]
    return torch.equal(live.cpu().view(units), wanted.view(units))
