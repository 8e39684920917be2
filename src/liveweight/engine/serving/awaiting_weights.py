"""Awaiting weights: an engine that holds a version takes no requests as long as a publisher has not brought it, or confirmed, the fleet's.

Begun by its configuration (it was started on a checkpoint, and others are further), or by a publisher whose other replicas went on
without it. Requests that run finish. Ended by a commit, or by a publisher that finds its version installed.
"""

from __future__ import annotations

from liveweight.errors import WeightsPending
from liveweight.observe import events as ev
from liveweight.observe.bus import Bus

STARTED = (
    "it was started on its checkpoint, and is to take no requests before a publisher has brought it a version"
)


class AwaitingWeights:
    """One engine's. `reason` says why it waits, or is None; for any thread. Told by the bus, on the leader's thread."""

    def __init__(self, bus: Bus, *, begins: bool) -> None:
        self.reason: str | None = STARTED if begins else None
        self._subscription = bus.subscribe(self._hear)

    @property
    def fault(self) -> WeightsPending | None:
        """What requests are refused with meanwhile."""
        reason = self.reason
        return None if reason is None else WeightsPending(reason)

    def check(self) -> None:
        """Raise WeightsPending while it waits."""
        fault = self.fault
        if fault is not None:
            raise fault

    def begin(self, reason: str) -> None:
        """Wait from now on."""
        self.reason = reason

    def close(self) -> None:
        """Hear no more."""
        self._subscription.close()

    def _hear(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.MarkedBehind(version=version, reason=reason):
                self.reason = f"it is behind {version}: {reason}"
            case ev.RoundCommitted(rank=None) | ev.VersionConfirmed():
                self.reason = None
            case _:
                return
