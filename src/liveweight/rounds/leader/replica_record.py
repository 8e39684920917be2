"""The record of a replica: its ranks, its state, its open round, and rounds that have ended.

The leader and its parts share one record: they decide, the record remembers and finds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from liveweight.errors import RoundOpen, WrongState
from liveweight.observe.events import RoundFacts
from liveweight.rounds import states
from liveweight.rounds.leader.audit import Audits
from liveweight.rounds.leader.membership import Ledger, Membership
from liveweight.rounds.leader.round_record import NEVER, LeaderRound
from liveweight.spec.manifest import Version
from liveweight.wire.messages import Phase
from liveweight.wire.messages.values import Fault, RoundId

REMEMBERED = 64


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """The record of one replica of `world` ranks. Used by the leader's thread. `since_s`: since when the present version serves."""

    replica: str
    boot: str
    world: int
    membership: Membership
    audits: Audits
    ledger: Ledger = field(default_factory=Ledger)
    state: states.State = field(default_factory=lambda: states.ServingState(None))
    since_s: float = NEVER
    epoch: int = 0
    round: LeaderRound | None = None
    ended: OrderedDict[RoundId, LeaderRound] = field(default_factory=OrderedDict)

    @property
    def serving(self) -> Version | None:
        """The version that requests are served with now."""
        return states.serving_version(self.state)

    @property
    def undo(self) -> Version | None:
        """The version that an undo would bring back."""
        return self.state.undo if isinstance(self.state, states.ServingState) else None

    @property
    def torn(self) -> states.TornState | None:
        """Why nothing may serve, if a round tore the replica."""
        return states.torn_by(self.state)

    def check_free(self) -> None:
        """Refuse a round while ranks are missing or another is open."""
        self.membership.whole()
        if self.round is not None:
            raise RoundOpen(self.replica, self.round.id.publisher)

    def current(self, round_id: RoundId, command: str) -> LeaderRound:
        """The open round, if it has that id."""
        if self.round is None or self.round.id != round_id:
            raise WrongState(f"not in that round ({states.describe(self.state)})", command)
        return self.round

    def find(self, round_id: RoundId) -> LeaderRound:
        """The round with that id, open or ended."""
        ended = self.ended.get(round_id)
        return ended if ended is not None else self.current(round_id, "a question about a round")

    def failed_by_rank(self) -> dict[RoundId, Fault]:
        """The faults of rounds that ended because of a rank: their publisher may not know yet, and go on."""
        faults = ((ended.id, ended.fault) for ended in self.ended.values())
        return {round_id: fault for round_id, fault in faults if fault is not None and fault.rank is not None}

    def close(self, current: LeaderRound, phase: Phase) -> None:
        """The round has ended."""
        current.phase, self.round = phase, None
        self.ended[current.id] = current
        last_kept = next((r.id for r in reversed(self.ended.values()) if r.phase == "done"), None)
        for old in list(self.ended)[:-REMEMBERED]:
            if old != last_kept:  # a rank in doubt about its outcome may still request it
                del self.ended[old]

    def facts(self, current: LeaderRound) -> RoundFacts:
        """The fields that all events of a round have."""
        return {"replica": self.replica, "round": f"{self.boot}/{current.id.epoch}", "version": current.label}
