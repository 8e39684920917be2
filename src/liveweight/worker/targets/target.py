"""The port of a target: the memory of a rank's weights, and the swap that makes a staged version visible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from liveweight.devices.memory import Memory
from liveweight.spec.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """The comparison of what serves with the copy that a rank keeps: tensors that differ, and tensors that cannot be read back."""

    differing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Target(Protocol):
    """A rank's weights and their shadow. Memory i of the layout is one parameter. Owned by the rank's process."""

    @property
    def layout(self) -> Layout:
        """What the rank owns, and where: the same for live memory and shadow. Declared once, by the parameters."""

    def live(self, tensors: Collection[str] | None = None) -> Sequence[Memory]:
        """The memory that serves now. Where that is not in memory, a copy, which needs to have only these tensors."""

    def shadow(self) -> Sequence[Memory]:
        """The memory that a round stages into: allocated and faulted in at first use, then kept. Called from the staging thread."""

    def keep(self, tensors: Collection[str]) -> None:
        """Copy the live content of these tensors into the shadow, so that a swap does not change them. Called from the staging thread."""

    def swap(self) -> None:
        """Swap live and shadow, all or nothing; its own inverse. Called from the rank's main thread, at a boundary."""

    @property
    def unread(self) -> int:
        """How many tensors of what is live were verified only in a copy of them: 0 where what is verified is what serves."""

    def read_back(self) -> ReadBack | None:
        """Compare what serves with `live`, where that is only a copy of it; None where it is what serves. From the live verifier's
        thread."""

    def release_shadow(self) -> None:
        """Give the shadow's memory back."""
