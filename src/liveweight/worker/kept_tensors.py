"""Kept tensors: the tensors of a rank that an offer leaves out stay as they are, through a commit and through its undo.

Before a round is staged, their live content is copied into the shadow. Both sides then hold the same content of these tensors, so no
swap has to know of them. Which groups may be left out is decided by the rank's program; whether one is, by the leader.
"""

from __future__ import annotations

from collections.abc import Iterable

from liveweight.errors import MessageInvalid
from liveweight.spec.layout import Layout
from liveweight.spec.manifest import OptionalGroup
from liveweight.worker.targets.target import Target


class KeptTensors:
    """One rank's optional groups. Used by the staging thread, which holds the shadow lock: no swap changes live weights meanwhile."""

    def __init__(self, target: Target, optional: Iterable[OptionalGroup]) -> None:
        self._target = target
        self._groups = {group.name: group.tensors for group in optional}
        self._layouts: dict[tuple[str, ...], Layout] = {(): target.layout}

    def layout(self, groups: tuple[str, ...]) -> Layout:
        """The layout of a round that leaves these groups out."""
        if groups not in self._layouts:
            self._layouts[groups] = self._target.layout.without(self._tensors(groups))
        return self._layouts[groups]

    def fill(self, groups: tuple[str, ...]) -> None:
        """Copy the live content of these groups into the shadow, as far as the rank owns it."""
        if groups:
            owned = self._target.layout.specs()
            self._target.keep([name for name in self._tensors(groups) if name in owned])

    def _tensors(self, groups: tuple[str, ...]) -> list[str]:
        unknown = [name for name in groups if name not in self._groups]
        if unknown:
            raise MessageInvalid(f"told to keep {', '.join(unknown)}, which this rank never offered to keep")
        return [tensor for name in groups for tensor in self._groups[name]]
