"""The kernels in C (native/). Importing this module fails where they were not built, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from liveweight.devices import _native
from liveweight.devices.bounds import Memories, Table, bound_copy, bound_digest, bound_freeze
from liveweight.devices.memory import Memory
from liveweight.spec.digest import SEEDS, Lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCopy:
    """A bound copy table. `keep` holds the memories."""

    rows: Table
    keep: tuple[Memory, ...]
    portable: bool

    def run(self, first: int, last: int) -> None:
        """Execute rows [first, last)."""
        _native.copy(self.rows, first, last, self.portable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDigest:
    """A bound digest table."""

    rows: Table
    keep: tuple[Memory, ...]
    slots: int
    portable: bool

    def run(self, first: int, last: int) -> Lanes:
        """The partial digests of rows [first, last)."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        _native.digest(self.rows, first, last, lanes, self.portable)
        return lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFreeze:
    """A bound freeze table."""

    rows: Table
    keep: tuple[Memory, ...]
    slots: int
    portable: bool

    def run(self, first: int, last: int) -> Lanes:
        """Move rows [first, last); their partial digests."""
        lanes = np.zeros((self.slots, SEEDS), dtype=np.uint32)
        _native.freeze(self.rows, first, last, lanes, self.portable)
        return lanes

    def move(self, first: int, last: int) -> None:
        """Move rows [first, last) without a digest."""
        _native.freeze(self.rows, first, last, None, self.portable)


class NativeKernels:
    """The C kernels. `portable` takes the plain C path even where the processor has a faster one: for tests."""

    def __init__(self, *, portable: bool = False) -> None:
        self._portable = portable

    @property
    def simd(self) -> str:
        """The instruction set in use."""
        return "portable" if self._portable else _native.simd()

    def bind_copy(self, rows: Table, sources: Sequence[Memory], targets: Sequence[Memory]) -> NativeCopy:
        """A copy table, checked."""
        table = bound_copy(rows, sources, targets)
        return NativeCopy(rows=table, keep=(*sources, *targets), portable=self._portable)

    def bind_digest(self, rows: Table, memories: Sequence[Memory], slots: int) -> NativeDigest:
        """A digest table, checked."""
        table = bound_digest(rows, memories, slots)
        return NativeDigest(rows=table, keep=tuple(memories), slots=slots, portable=self._portable)

    def bind_freeze(self, rows: Table, sources: Memories, targets: Memories, slots: int) -> NativeFreeze:
        """A freeze table, checked."""
        table = bound_freeze(rows, sources, targets, slots)
        keep = (*sources, *targets)
        return NativeFreeze(rows=table, keep=keep, slots=slots, portable=self._portable)
