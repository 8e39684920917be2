"""What a replica is told beside its rounds: that it is behind, that it sleeps or is awake, that a round of before was given up.

Decided on the scheduler's thread, in its record.
"""

from __future__ import annotations

from liveweight.errors import RoundAborted, RoundOpen, WrongState
from liveweight.observe import events
from liveweight.rounds import states
from liveweight.rounds.leader.replica_record import ReplicaRecord
from liveweight.rounds.leader.round_end import RoundEnd
from liveweight.rounds.leader.round_record import Action, EmitEvent, SendReply
from liveweight.wire import messages as m
from liveweight.wire.messages.values import fault_of


class Notices:
    """One replica's. Used by the scheduler's thread."""

    def __init__(self, record: ReplicaRecord, round_end: RoundEnd) -> None:
        self._record, self._round_end = record, round_end

    def told(self, peer: bytes, call: int, body: m.Sleep | m.Wake | m.MarkBehind) -> list[Action]:
        """A message that is no round's."""
        match body:
            case m.MarkBehind(version=version, reason=reason):
                if self._record.serving == version:
                    return []  # heard late
                said = events.MarkedBehind(replica=self._record.replica, version=str(version), reason=reason)
                return [EmitEvent(said)]
            case m.Sleep() | m.Wake():
                return self._rest(peer, call, body)

    def _rest(self, peer: bytes, call: int, body: m.Sleep | m.Wake) -> list[Action]:
        """The engine gives memory back, or has it again. Its ranks do so between two steps, after this and before that."""
        record = self._record
        if record.round is not None:
            raise RoundOpen(record.replica, record.round.id.publisher)
        moved = states.sleep if isinstance(body, m.Sleep) else states.wake
        record.state = moved(record.state, weights=body.weights, kv_cache=body.kv_cache)
        error = WrongState(states.describe(record.state), "a verification")
        ended = record.audits.end(error) if body.weights else []
        return [*ended, SendReply(peer, call, m.SleepNoted())]

    def check_awake(self, command: str) -> None:
        """Refuse what needs weights while they are given back."""
        if isinstance(self._record.state, states.ReleasedState) and self._record.state.weights:
            raise WrongState(states.describe(self._record.state), command)

    def give_up(self, now_s: float, body: m.Open) -> list[Action]:
        """Make room for a round. One that the same publisher opens again it has given up: it runs one at a time, and was not heard."""
        current = self._record.round
        ours = current is not None and current.asked is not None and current.id.publisher == body.publisher
        if current is None or not ours or current.phase == "committing":
            return []
        error = RoundAborted("its publisher has begun another one")
        return self._round_end.fail(now_s, current, fault_of(error, step=current.phase))
