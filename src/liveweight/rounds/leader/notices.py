"""Messages outside a round: the replica is behind, the engine sleeps or wakes up, an earlier round was given up by its publisher.

Part of the leader: changes the leader's record, on the leader's thread.
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
    """Handles the notices for one replica. Used by the leader's thread."""

    def __init__(self, record: ReplicaRecord, round_end: RoundEnd) -> None:
        self._record, self._round_end = record, round_end

    def on_message(self, peer: bytes, call: int, body: m.Sleep | m.Wake | m.MarkBehind) -> list[Action]:
        """Handle a message that belongs to no round."""
        match body:
            case m.MarkBehind(version=version, reason=reason):
                if self._record.serving == version:
                    return []  # it arrived late
                event = events.MarkedBehind(replica=self._record.replica, version=str(version), reason=reason)
                return [EmitEvent(event)]
            case m.Sleep() | m.Wake():
                return self._sleep_or_wake(peer, call, body)

    def _sleep_or_wake(self, peer: bytes, call: int, body: m.Sleep | m.Wake) -> list[Action]:
        """The engine gives memory back, or has restored it. Its ranks release memory after Sleep, and restore it before Wake."""
        record = self._record
        if record.round is not None:
            raise RoundOpen(record.replica, record.round.id.publisher)
        moved = states.sleep if isinstance(body, m.Sleep) else states.wake
        record.state = moved(record.state, weights=body.weights, kv_cache=body.kv_cache)
        error = WrongState(states.describe(record.state), "a verification")
        ended = record.audits.end(error) if body.weights else []
        return [*ended, SendReply(peer, call, m.SleepNoted())]

    def check_awake(self, command: str) -> None:
        """Refuse a command that needs weights while they are given back."""
        if isinstance(self._record.state, states.ReleasedState) and self._record.state.weights:
            raise WrongState(states.describe(self._record.state), command)

    def give_up(self, now_s: float, body: m.Open) -> list[Action]:
        """End the open round if its publisher opens another: it runs one at a time, so it gave this one up and the abort was lost."""
        current = self._record.round
        ours = current is not None and current.request is not None and current.id.publisher == body.publisher
        if current is None or not ours or current.phase == "committing":
            return []
        error = RoundAborted("its publisher has begun another one")
        return self._round_end.fail(now_s, current, fault_of(error, step=current.phase))
