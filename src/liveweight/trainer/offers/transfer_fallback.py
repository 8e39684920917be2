"""The ways of a publisher: its transfer modes in the order in which they are tried, and which of them is in use.

Owns the transport sources, and the rule by which one gives way to the next: a mode that failed is left at the next attempt, after the
last comes the first again, and one that works is kept. What is offered over a way is offers'.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from liveweight.devices.device import Device
from liveweight.errors import (
    DeadlineExceeded,
    DigestMismatch,
    LiveWeightError,
    OfferChanged,
    OutOfMemory,
    Refused,
    RoundAborted,
    RoundFailed,
    Unavailable,
    WireError,
)
from liveweight.observe.bus import Bus
from liveweight.observe.events import ModeFailed, OfferKind
from liveweight.rounds.report import FailedMode
from liveweight.transports.port import TransportSource
from liveweight.transports.registry import Mode, check_offer, mode
from liveweight.wire.credentials import Secret

_NOT_THE_WAYS = (OfferChanged, OutOfMemory, RoundAborted)
"""What may fail while ranks stage, whichever way the bytes come."""
_AT_THE_SOURCE = (Unavailable, WireError, DeadlineExceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMode:
    """A transfer mode, and its half in this process."""

    mode: Mode
    transport_source: TransportSource


def in_order(transfer_mode: str | None, modes: Sequence[str], offer: OfferKind) -> tuple[Mode, ...]:
    """The modes that were asked for, by one name or by several; the first must have offers of that kind."""
    if transfer_mode is not None and modes:
        raise Refused("transfer_mode names one mode, modes several in their order: give one of the two")
    names = tuple(modes) or ("ipc" if transfer_mode is None else transfer_mode,)
    if len(set(names)) != len(names):
        raise Refused(f"a transfer mode is named twice: {', '.join(names)}")
    chosen = tuple(mode(name) for name in names)
    check_offer(chosen[0], offer)
    return chosen


class TransferFallback:
    """Offers are made over `now`, by the thread that offers; failures are noted by the one that drives rounds, between two offers."""

    def __init__(self, fallback: Sequence[OpenMode], bus: Bus) -> None:
        self._fallback, self._bus = tuple(fallback), bus
        self._lock = threading.Lock()
        self._place = 0
        self._failed: dict[str, FailedMode] = {}

    @classmethod
    def opened(
        cls,
        chosen: Sequence[Mode],
        hosts: Sequence[str | None],
        directory: Path,
        secret: Secret,
        device: Device,
        bus: Bus,
    ) -> TransferFallback:
        """All of them, so that one that cannot be had is told before the first round; then none is left open. `hosts`: this one's
        address that ranks of each are told."""
        with ExitStack() as stack:
            fallback = []
            for each, host in zip(chosen, hosts, strict=True):
                fallback.append(
                    OpenMode(
                        mode=each, transport_source=each.transport_source(directory, secret, device, host)
                    )
                )
                stack.callback(fallback[-1].transport_source.close)
            stack.pop_all()
        return cls(fallback, bus)

    @property
    def now(self) -> OpenMode:
        """The one in use; for an attempt that began, the next one after a failure."""
        with self._lock:
            return self._fallback[self._place]

    @property
    def failed_modes(self) -> tuple[FailedMode, ...]:
        """Those that have failed and were not tried since, in the publisher's order."""
        with self._lock:
            return tuple(self._failed[w.mode.name] for w in self._fallback if w.mode.name in self._failed)

    def after(self, error: RoundFailed) -> RoundFailed:
        """What to raise where a round failed so: where it was the way's failure, that says which mode comes next."""
        at_fault = (
            isinstance(error.cause, DigestMismatch)
            if error.step == "verify"
            else error.step == "stage" and not isinstance(error.cause, _NOT_THE_WAYS)
        )
        following = self._leave(error.cause) if at_fault else None
        return error if following is None else error.with_next_mode(following)

    def after_offering(self, error: LiveWeightError) -> None:
        """An offer could not be made: note it, if that was the way's failure."""
        if isinstance(error, _AT_THE_SOURCE):
            self._leave(error)

    def close(self) -> None:
        """Close every transport source."""
        for open_mode in self._fallback:
            open_mode.transport_source.close()

    def _leave(self, cause: LiveWeightError) -> str | None:
        """The next mode is in use from now on; its name, if there is another."""
        if len(self._fallback) == 1:
            return None
        with self._lock:
            left = self._fallback[self._place].mode.name
            self._place = (self._place + 1) % len(self._fallback)
            following = self._fallback[self._place].mode.name
            self._failed[left] = FailedMode(mode=left, code=cause.code, reason=str(cause))
            self._failed.pop(following, None)
        self._bus.emit(ModeFailed(mode=left, code=cause.code, reason=str(cause), following=following))
        return following
