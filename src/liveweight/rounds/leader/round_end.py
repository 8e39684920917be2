"""How a round ends: every rank keeps the new weights, or every rank has the old ones; in place, torn where neither is so. Pure."""

from __future__ import annotations

from liveweight.errors import Torn
from liveweight.observe import events
from liveweight.rounds import states
from liveweight.rounds.leader.audit_references import of_round
from liveweight.rounds.leader.replica_record import ReplicaRecord
from liveweight.rounds.leader.round_record import (
    Action,
    EmitEvent,
    LeaderRound,
    NotifyRank,
    SendReply,
    WithdrawDecision,
)
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, fault_of


class RoundEnd:
    """Ends the rounds of one replica, and tells everybody who waits for that."""

    def __init__(self, record: ReplicaRecord) -> None:
        self._record = record

    def done(self, now_s: float, current: LeaderRound) -> list[Action]:
        """All ranks keep what they have now."""
        record = self._record
        record.state = (
            states.overwritten(record.state) if current.in_place else states.settled(record.state, keep=True)
        )
        serving = record.serving
        record.membership.serve(serving)
        record.since_s = now_s
        record.ledger.published(serving)
        self._note_installed(current, serving)
        stall_s = max(ack.seconds for ack in current.acks.values())
        actions: list[Action] = self._settle(current, keep=True)
        if current.committer is not None:
            answer = m.Committed(serving=serving, undo=record.undo, stall_s=stall_s, ranks=current.times())
            actions.append(SendReply(*current.committer, answer))
        said = (
            events.RoundCommitted(**record.who(current), stall_s=stall_s)
            if current.asked is not None
            else events.RoundUndone(**record.who(current), serving=str(serving), stall_s=stall_s)
        )
        outcome = events.RoundOutcome.COMMITTED if current.asked is not None else events.RoundOutcome.UNDONE
        return [*actions, EmitEvent(said), self._end(now_s, current, "done", outcome)]

    def fail(self, now_s: float, current: LeaderRound, fault: Fault) -> list[Action]:
        """End it from any phase, at the old version or torn; ranks that swapped are told to swap back."""
        record = self._record
        committing = current.phase == "committing"
        fault, torn = self._fallen_to(current, fault)
        current.fault = fault
        actions: list[Action] = self._settle(current, keep=False) + torn
        if committing:
            actions.append(WithdrawDecision(current.id))
        if current.committer is not None:
            actions.append(SendReply(*current.committer, m.Refusal(fault=fault, serving=record.serving)))
        actions += [
            NotifyRank(rank, m.DropShadow(round=current.id))
            for rank in sorted(current.ranks & set(record.membership.members))
        ]
        aborted = events.RoundGivenUp(
            **record.who(current), rank=fault.rank, step=fault.step, code=fault.code, reason=fault.message
        )
        outcome = (
            events.RoundOutcome.TORN
            if isinstance(record.state, states.TornState)
            else events.RoundOutcome.ABORTED
        )
        return [*actions, EmitEvent(aborted), self._end(now_s, current, "failed", outcome)]

    def outcome(self, current: LeaderRound, *, keep: bool) -> m.Settled:
        """What a rank is told that swapped, or overwrote, its weights."""
        torn = self._record.torn if current.in_place else None
        return m.Settled(keep=keep, serving=self._record.serving, torn=None if torn is None else torn.cause)

    def _settle(self, current: LeaderRound, *, keep: bool) -> list[Action]:
        outcome = self.outcome(current, keep=keep)
        return [SendReply(ack.peer, ack.call, outcome) for ack in current.acks.values()]

    def _fallen_to(self, current: LeaderRound, fault: Fault) -> tuple[Fault, list[Action]]:
        """Which state a failure leaves, what it is called then, and who is told of it."""
        record = self._record
        if current.in_place and current.phase == "committing":
            if not current.touched:
                record.state = states.untouched(record.state)
            else:
                cause = f"{record.replica} holds a mixture since {current.label} failed: {fault.message}"
                fault = fault_of(Torn(cause), step=fault.step, rank=fault.rank, waited_s=fault.waited_s)
                record.state = states.after_failure(record.state, fault.message)
        else:
            record.state = states.after_failure(record.state, fault.message)
            if fault.code == Torn.code and current.asked is not None:
                record.state = states.TornState(current.asked.version, fault.message)
        if isinstance(record.state, states.TornState):
            return fault, record.audits.torn(fault.to_error())
        record.audits.stayed()
        return fault, []

    def _note_installed(self, current: LeaderRound, serving: Version | None) -> None:
        """What the ranks hold from now on, so that it can be verified later."""
        audits, world = self._record.audits, self._record.world
        if current.asked is None:
            audits.undone()
            return
        whole = len(current.lanes) == world
        parts = [current.lanes[rank] for rank in range(world)] if whole else []
        base = audits.reference
        brought = None if current.fit is None else of_round(current.fit, current.asked.digests, parts, base)
        audits.committed(serving, brought)

    def _end(
        self, now_s: float, current: LeaderRound, phase: m.Phase, outcome: events.RoundOutcome
    ) -> Action:
        record = self._record
        record.close(current, phase)
        return EmitEvent(
            events.RoundEnded(
                **record.who(current),
                outcome=outcome,
                took_s=now_s - current.began_s,
                verified=current.asked is not None and current.asked.verify,
                serving=None if record.serving is None else str(record.serving),
            )
        )
