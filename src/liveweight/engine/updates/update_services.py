"""Update services: the threads and connections of an engine that serve its weights, not its requests.

The engine creates them in order on a stack, which closes them. Without live updates there are none.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from liveweight.engine.config import EngineConfig
from liveweight.engine.recovery.snapshot_saving import SnapshotSaver
from liveweight.engine.serving.pauses import Pauses
from liveweight.engine.updates.leader_client import LeaderClient
from liveweight.engine.updates.live_updates import DecisionInbox, start_leader
from liveweight.engine.updates.requested_update import RequestedUpdates
from liveweight.engine.updates.verifying import Verifier
from liveweight.observe.bus import Bus
from liveweight.rounds.leader_server import LeaderServer
from liveweight.wire.credentials import Secret, load_or_create_secret


class UpdateServices:
    """The services of one engine. Leader, leader client and snapshot saver exist before its ranks; the others need its pauses."""

    def __init__(
        self, config: EngineConfig, replica: str, inbox: DecisionInbox, bus: Bus, stack: ExitStack
    ) -> None:
        self._config, self._replica = config, replica
        self.leader: LeaderServer | None = None
        self.leader_client: LeaderClient | None = None
        self.saver: SnapshotSaver | None = None
        self._secret: Secret | None = None
        updates = config.updates
        if updates is None:
            return
        self._secret = secret = load_or_create_secret(Path(updates.secret_file))
        self.leader = start_leader(
            updates, secret=secret, world=config.tp, replica=replica, bus=bus, inbox=inbox
        )
        stack.callback(self.leader.close)
        self.leader_client = LeaderClient(self.leader.address, secret, bus)
        stack.callback(self.leader_client.close)
        if config.snapshots is None:
            return
        self.saver = SnapshotSaver(
            config.snapshots,
            leader=self.leader_client.address,
            secret=secret,
            replica=replica,
            world=config.tp,
            bus=bus,
        )
        stack.callback(self.saver.close)

    def requested_updates(self, pauses: Pauses, stack: ExitStack) -> RequestedUpdates | None:
        """Create the requested updates; None without a source. The stack closes them before the leader."""
        updates = self._config.updates
        if self.leader_client is None or self._secret is None or updates is None or updates.source is None:
            return None
        requested = RequestedUpdates(
            updates.source,
            transfer_mode=updates.transfer_mode,
            leader=self.leader_client.address,
            secret=self._secret,
            replica=self._replica,
            world=self._config.tp,
            pauses=pauses,
        )
        stack.callback(requested.close)
        return requested

    def verifier(self, stack: ExitStack) -> Verifier | None:
        """Create the verifier; None without live updates."""
        updates = self._config.updates
        if self.leader_client is None or self._secret is None or updates is None:
            return None
        verifier = Verifier(
            self.leader_client.address, self._secret, source=updates.source, replica=self._replica
        )
        stack.callback(verifier.close)
        return verifier
