"""Awaiting weights: an engine takes no requests until a publisher has brought it the fleet's version, or confirmed that it has it.

Begins by configuration (the engine was started on a checkpoint, and others are further), or when a publisher marks the replica as
behind. Running requests finish. Ends with a commit, or when a publisher finds its version installed.
"""

from __future__ import annotations

from liveweight.errors import WeightsPending
from liveweight.observe import events as ev
from liveweight.observe.bus import Bus

STARTED = (
    "it was started on its checkpoint, and is to take no requests before a publisher has brought it a version"
)


class AwaitingWeights:
    """Whether one engine waits. `reason` says why, or is None; for any thread. The bus calls it on the leader's thread."""

    def __init__(self, bus: Bus, *, begins: bool) -> None:
        self.reason: str | None = STARTED if begins else None
        self._subscription = bus.subscribe(self._on_event)

    @property
    def fault(self) -> WeightsPending | None:
        """The error for requests while the engine waits; else None."""
        reason = self.reason
        return None if reason is None else WeightsPending(reason)

    def check(self) -> None:
        """Raise WeightsPending while the engine waits."""
        fault = self.fault
        if fault is not None:
            raise fault

    def begin(self, reason: str) -> None:
        """Wait from now on."""
        self.reason = reason

    def close(self) -> None:
        """Unsubscribe from the bus."""
        self._subscription.close()

    def _on_event(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.MarkedBehind(version=version, reason=reason):
                self.reason = f"it is behind {version}: {reason}"
            case ev.RoundCommitted(rank=None) | ev.VersionConfirmed():
                self.reason = None
            case _:
                return
