"""The offices of an engine: those of its threads and connections that are there for its weights and not for its requests.

Made with the engine, in order, on a stack that closes them. Without live updates there are none.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from liveweight.engine.config import EngineConfig
from liveweight.engine.recovery.snapshot_saving import Saving
from liveweight.engine.serving.pauses import Pauses
from liveweight.engine.updates.leader_client import Desk
from liveweight.engine.updates.live_updates import Inbox, lead
from liveweight.engine.updates.requested_update import Requested
from liveweight.engine.updates.verifying import Verifying
from liveweight.observe.bus import Bus
from liveweight.rounds.leader_server import Leader
from liveweight.wire.credentials import Secret, load_or_create_secret


class Offices:
    """One engine's. The leader and the desk are there before its ranks; those that need its pauses come after."""

    def __init__(self, config: EngineConfig, replica: str, inbox: Inbox, bus: Bus, stack: ExitStack) -> None:
        self._config, self._replica = config, replica
        self.leader: Leader | None = None
        self.desk: Desk | None = None
        self.saving: Saving | None = None
        self._secret: Secret | None = None
        updates = config.updates
        if updates is None:
            return
        self._secret = secret = load_or_create_secret(Path(updates.secret_file))
        self.leader = lead(updates, secret=secret, world=config.tp, replica=replica, bus=bus, inbox=inbox)
        stack.callback(self.leader.close)
        self.desk = Desk(self.leader.address, secret, bus)
        stack.callback(self.desk.close)
        if config.snapshots is None:
            return
        self.saving = Saving(
            config.snapshots,
            leader=self.desk.address,
            secret=secret,
            replica=replica,
            world=config.tp,
            bus=bus,
        )
        stack.callback(self.saving.close)

    def requested(self, pauses: Pauses, stack: ExitStack) -> Requested | None:
        """Who drives updates that are asked for; None without a source. Closed before those whom it drives."""
        updates = self._config.updates
        if self.desk is None or self._secret is None or updates is None or updates.source is None:
            return None
        requested = Requested(
            updates.source,
            transfer_mode=updates.transfer_mode,
            leader=self.desk.address,
            secret=self._secret,
            replica=self._replica,
            world=self._config.tp,
            pauses=pauses,
        )
        stack.callback(requested.close)
        return requested

    def verifying(self, stack: ExitStack) -> Verifying | None:
        """Who asks the ranks what they hold; None without live updates."""
        updates = self._config.updates
        if self.desk is None or self._secret is None or updates is None:
            return None
        verifying = Verifying(self.desk.address, self._secret, source=updates.source, replica=self._replica)
        stack.callback(verifying.close)
        return verifying
