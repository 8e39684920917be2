"""A replica that says how far its rounds have come, for a torture that cannot hear the engine's own leader."""

from __future__ import annotations

from collections.abc import Callable

from liveweight.lab.torture.fault_plan import After
from liveweight.rounds.replica import Replica
from liveweight.spec.deadline import Deadline
from liveweight.wire import messages as m
from liveweight.wire.messages.values import RoundId


class ReportingReplica:
    """Drives another one; it implements the same port. `say` is called by the publisher's threads, after the fact."""

    def __init__(self, replica: Replica, say: Callable[[After], None]) -> None:
        self._replica, self._say = replica, say
        self.replica_state, self.describe, self.compare = (
            replica.replica_state,
            replica.describe,
            replica.compare,
        )
        self.abort, self.mark_behind, self.undo = replica.abort, replica.mark_behind, replica.undo
        self.verify, self.interrupt, self.close = replica.verify, replica.interrupt, replica.close

    @property
    def name(self) -> str:
        """See Replica."""
        return self._replica.name

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica."""
        opened = self._replica.open(body, deadline)
        self._say("RoundOpened")
        return opened

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica."""
        progress = self._replica.status(round_id, until, deadline)
        if until == "verified" and progress.fault is None and m.ORDER[progress.phase] >= m.ORDER[until]:
            self._say("RankVerified")
        return progress

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.vote(round_id, lease_s, deadline)
        self._say("VoteCast")

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""
        committed = self._replica.commit(round_id, deadline)
        self._say("RoundCommitted")
        return committed
