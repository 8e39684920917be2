"""Kept tensors: the tensors of a rank that an offer leaves out stay as they are, through a commit and through its undo.

Before a round is staged, their live content is copied into the shadow. Both sides then hold the same content of these tensors, so no
swap has to know of them. Which tensors are kept is the leader's decision.
"""

from __future__ import annotations

from liveweight.spec.layout import Layout
from liveweight.worker.targets.target import Target


class KeptTensors:
    """The kept tensors of one rank's rounds. Used by the staging thread, which holds the shadow lock: no swap changes live weights
    meanwhile."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: tuple[tuple[str, ...], Layout] = ((), target.layout)

    def layout(self, names: tuple[str, ...]) -> Layout:
        """The layout of a round that leaves these tensors out. Most rounds leave out what the round before did."""
        if self._last[0] != names:
            self._last = names, self._target.layout.without(names) if names else self._target.layout
        return self._last[1]

    def fill(self, names: tuple[str, ...]) -> None:
        """Copy the live content of these tensors into the shadow, as far as the rank owns it."""
        if names:
            owned = self._target.layout.specs()
            self._target.keep([name for name in names if name in owned])
