"""The end of a round: every rank keeps the new weights, or every rank has the old ones; in place, torn if neither is true. Pure."""

from __future__ import annotations

from liveweight.errors import Torn
from liveweight.observe import events
from liveweight.plan.digest_sums import KEPT
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
    """Ends the rounds of one replica, and answers the calls that wait for the end."""

    def __init__(self, record: ReplicaRecord) -> None:
        self._record = record

    def done(self, now_s: float, current: LeaderRound) -> list[Action]:
        """All ranks keep the weights that they have now."""
        record = self._record
        record.state = (
            states.overwritten(record.state) if current.in_place else states.settled(record.state, keep=True)
        )
        serving = record.serving
        if record.membership.in_place:
            record.state = states.ServingState(
                serving
            )  # also after a version whose content was there already
        record.membership.serve(serving)
        record.since_s = now_s
        record.ledger.published(serving)
        self._note_installed(current, serving)
        stall_s = max(ack.seconds for ack in current.acks.values())
        actions: list[Action] = self._settle(current, keep=True)
        if current.committer is not None:
            answer = m.Committed(serving=serving, undo=record.undo, stall_s=stall_s, ranks=current.times())
            actions.append(SendReply(*current.committer, answer))
        event = (
            events.RoundCommitted(**record.facts(current), stall_s=stall_s)
            if current.request is not None
            else events.RoundUndone(**record.facts(current), serving=str(serving), stall_s=stall_s)
        )
        outcome = events.RoundOutcome.COMMITTED if current.request is not None else events.RoundOutcome.UNDONE
        return [*actions, EmitEvent(event), self._end(now_s, current, "done", outcome)]

    def fail(self, now_s: float, current: LeaderRound, fault: Fault) -> list[Action]:
        """End the round from any phase, at the old version or torn. Ranks that swapped are told to swap back."""
        record = self._record
        committing = current.phase == "committing"
        fault, torn = self._state_after(current, fault)
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
            **record.facts(current), rank=fault.rank, step=fault.step, code=fault.code, reason=fault.message
        )
        outcome = (
            events.RoundOutcome.TORN
            if isinstance(record.state, states.TornState)
            else events.RoundOutcome.ABORTED
        )
        return [*actions, EmitEvent(aborted), self._end(now_s, current, "failed", outcome)]

    def outcome(self, current: LeaderRound, *, keep: bool) -> m.Settled:
        """The answer to a rank that swapped, or overwrote, its weights."""
        torn = self._record.torn if current.in_place else None
        return m.Settled(keep=keep, serving=self._record.serving, torn=None if torn is None else torn.cause)

    def _settle(self, current: LeaderRound, *, keep: bool) -> list[Action]:
        outcome = self.outcome(current, keep=keep)
        return [SendReply(ack.peer, ack.call, outcome) for ack in current.acks.values()]

    def _state_after(self, current: LeaderRound, fault: Fault) -> tuple[Fault, list[Action]]:
        """Set the state that a failure leaves. Returns the fault to report, and answers to audits that a torn replica ends."""
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
            if fault.code == Torn.code and current.request is not None:
                record.state = states.TornState(current.request.version, fault.message)
        if isinstance(record.state, states.TornState):
            return fault, record.audits.on_torn(fault.to_error())
        record.audits.on_swap_failed()
        return fault, []

    def _note_installed(self, current: LeaderRound, serving: Version | None) -> None:
        """Note the content that the ranks hold from now on, so that audits can compare with it."""
        audits, world = self._record.audits, self._record.world
        if current.request is None:
            audits.on_undone()
            self._record.ledger.on_changed(None)
            return
        if current.unchanged:
            audits.on_renamed(serving)
            return
        whole = len(current.lanes) == world
        parts = [current.lanes[rank] for rank in range(world)] if whole else []
        base = audits.reference
        brought = None if current.fit is None else of_round(current.fit, current.request.digests, parts, base)
        filled = None if current.fit is None else current.fit.sources != KEPT
        audits.on_committed(serving, brought, filled)
        self._record.ledger.on_changed(self._record.membership.names_of(filled))

    def _end(
        self, now_s: float, current: LeaderRound, phase: m.Phase, outcome: events.RoundOutcome
    ) -> Action:
        record = self._record
        record.close(current, phase)
        return EmitEvent(
            events.RoundEnded(
                **record.facts(current),
                outcome=outcome,
                took_s=now_s - current.began_s,
                verified=current.request is not None and current.request.verify,
                serving=None if record.serving is None else str(record.serving),
            )
        )
