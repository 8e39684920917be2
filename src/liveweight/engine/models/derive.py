"""Derived tensors: what a module keeps of its weights in another form, so that no step computes it again.

They are no parameters: no checkpoint has them, no round writes them. They are stale after every change of weights until `derive` has run,
which is a hook's matter (engine/rank/hooks).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Deriving(Protocol):
    """A module that has derived tensors."""

    def derive(self) -> None:
        """Compute them from the present weights, in place: addresses that others hold stay valid."""
