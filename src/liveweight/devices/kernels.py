"""The port of the kernels, and which implementation this machine gets.

A table of plan/ is bound to memories once, which checks that no row leaves them, and then run as often as needed, range by range.
Ranges may run in several threads at once: the plan makes sure that they do not write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from liveweight.devices.bounds import Memories
from liveweight.devices.memory import Memory
from liveweight.observe.bus import Bus
from liveweight.observe.events import KernelsChosen
from liveweight.spec.digest import Lanes

Table: TypeAlias = npt.NDArray[np.int64]


class BoundCopy(Protocol):
    """Copies, bound to their memories, which it keeps alive."""

    def run(self, first: int, last: int) -> None:
        """Execute rows [first, last). Any thread; with the native kernels the GIL is released."""
        ...


class BoundDigest(Protocol):
    """A digest table, bound to its memories, which it keeps alive."""

    @property
    def rows(self) -> Table:
        """The bound table: as it was given, with addresses in place of offsets."""
        ...

    def run(self, first: int, last: int) -> Lanes:
        """What rows [first, last) contribute to the digest of each slot: a new array (slots, 4). Sums of all ranges add up."""
        ...


class BoundFreeze(Protocol):
    """Copies that digest what they write, bound to their memories, which it keeps alive."""

    @property
    def rows(self) -> Table:
        """The bound table: as it was given, with addresses in place of offsets."""
        ...

    def run(self, first: int, last: int) -> Lanes:
        """Move rows [first, last), and digest them as a BoundDigest would digest the target."""
        ...

    def move(self, first: int, last: int) -> None:
        """The same without the digest."""
        ...


class Kernels(Protocol):
    """Executes tables. Binding raises LayoutInvalid, naming the row, where one leaves its memory or writes what is read-only."""

    def bind_copy(self, rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> BoundCopy:
        """A table of plan/copies."""
        ...

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> BoundDigest:
        """A table of plan/digests."""
        ...

    def bind_freeze(self, rows: Table, sources: Memories, targets: Memories, slots: int) -> BoundFreeze:
        """A table of plan/freezes."""
        ...


Bound: TypeAlias = BoundCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernels:
    """An implementation, its name with the instruction set, and why it is not the native one; None if it is."""

    kernels: Kernels
    name: str
    reason: str | None = None


def choose() -> ChosenKernels:
    """The native kernels, or NumPy's where those were not built. Importing decides it, so it does not change while the process runs."""
    try:
        from liveweight.devices.native_kernels import NativeKernels
    except ImportError as error:
        from liveweight.devices.numpy_kernels import NumpyKernels

        return ChosenKernels(kernels=NumpyKernels(), name="numpy", reason=str(error))
    native = NativeKernels()
    return ChosenKernels(kernels=native, name=f"native ({native.simd})")


def choose_kernels(bus: Bus | None = None, chosen: ChosenKernels | None = None) -> Kernels:
    """The kernels to use: the host's, or those that a device chose. With a bus, emits KernelsChosen."""
    chosen = choose() if chosen is None else chosen
    if bus is not None:
        bus.emit(KernelsChosen(name=chosen.name, reason=chosen.reason))
    return chosen.kernels
