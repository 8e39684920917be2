"""A replica that reports the moments of its rounds, for a target whose leader's events the torture cannot read."""

from __future__ import annotations

from collections.abc import Callable

from liveweight.lab.torture.fault_plan import After
from liveweight.rounds.replica import Replica
from liveweight.spec.deadline import Deadline
from liveweight.wire import messages as m
from liveweight.wire.messages.values import RoundId


class ReportingReplica:
    """Wraps a replica; implements the port Replica. Calls `on_moment` from the publisher's threads, once a moment is reached."""

    def __init__(self, replica: Replica, on_moment: Callable[[After], None]) -> None:
        self._replica, self._on_moment = replica, on_moment
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
        self._on_moment("RoundOpened")
        return opened

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica."""
        progress = self._replica.status(round_id, until, deadline)
        if until == "verified" and progress.fault is None and m.ORDER[progress.phase] >= m.ORDER[until]:
            self._on_moment("RankVerified")
        return progress

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica."""
        self._replica.vote(round_id, lease_s, deadline)
        self._on_moment("VoteCast")

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""
        committed = self._replica.commit(round_id, deadline)
        self._on_moment("RoundCommitted")
        return committed
