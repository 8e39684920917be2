"""Transfer fallback: a publisher's transfer modes in the order in which they are tried, and the mode that is in use.

Owns the transport sources and the rule for changing modes: after a failure the next attempt uses the next mode, after the last mode comes
the first again, and a mode that works is kept. Offers are SingleSourceOffers' (single_source.py).
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

_NOT_THE_MODES = (OfferChanged, OutOfMemory, RoundAborted)
"""Errors while ranks stage that no transfer mode causes."""
_AT_THE_SOURCE = (Unavailable, WireError, DeadlineExceeded)
"""Errors of making an offer that the transfer mode causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMode:
    """A transfer mode, and its transport source in this process."""

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
    """The thread that offers uses `now`; the thread that runs rounds records failures, between two offers."""

    def __init__(self, modes: Sequence[OpenMode], bus: Bus) -> None:
        self._modes, self._bus = tuple(modes), bus
        self._lock = threading.Lock()
        self._position = 0
        self._failed: dict[str, FailedMode] = {}

    @classmethod
    def open(
        cls,
        chosen: Sequence[Mode],
        hosts: Sequence[str | None],
        directory: Path,
        secret: Secret,
        device: Device,
        bus: Bus,
    ) -> TransferFallback:
        """Open every mode now, so that a missing dependency fails here and not in the first round. If one fails, close the others.
        `hosts`: for each mode, this host's address for ranks to connect to."""
        with ExitStack() as stack:
            modes = []
            for each, host in zip(chosen, hosts, strict=True):
                modes.append(
                    OpenMode(
                        mode=each, transport_source=each.transport_source(directory, secret, device, host)
                    )
                )
                stack.callback(modes[-1].transport_source.close)
            stack.pop_all()
        return cls(modes, bus)

    @property
    def now(self) -> OpenMode:
        """The mode in use; after a failure, the next one."""
        with self._lock:
            return self._modes[self._position]

    @property
    def failed_modes(self) -> tuple[FailedMode, ...]:
        """The modes that have failed and were not tried since, in the publisher's order."""
        with self._lock:
            return tuple(self._failed[m.mode.name] for m in self._modes if m.mode.name in self._failed)

    def after(self, error: RoundFailed) -> RoundFailed:
        """Returns the error to raise for a failed round. If the transfer mode failed, the error names the next mode."""
        at_fault = (
            isinstance(error.cause, DigestMismatch)
            if error.step == "verify"
            else error.step == "stage" and not isinstance(error.cause, _NOT_THE_MODES)
        )
        following = self._next_mode(error.cause) if at_fault else None
        return error if following is None else error.with_next_mode(following)

    def after_offering(self, error: LiveWeightError) -> None:
        """An offer could not be made: go to the next mode, if the transfer mode failed."""
        if isinstance(error, _AT_THE_SOURCE):
            self._next_mode(error)

    def close(self) -> None:
        """Close every transport source."""
        for open_mode in self._modes:
            open_mode.transport_source.close()

    def _next_mode(self, cause: LiveWeightError) -> str | None:
        """Use the next mode from now on. Returns its name; None if there is only one mode."""
        if len(self._modes) == 1:
            return None
        with self._lock:
            left = self._modes[self._position].mode.name
            self._position = (self._position + 1) % len(self._modes)
            following = self._modes[self._position].mode.name
            self._failed[left] = FailedMode(mode=left, code=cause.code, reason=str(cause))
            self._failed.pop(following, None)
        self._bus.emit(ModeFailed(mode=left, code=cause.code, reason=str(cause), following=following))
        return following
