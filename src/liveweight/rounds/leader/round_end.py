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

    def __init__(self, books: ReplicaRecord) -> None:
        self._books = books

    def done(self, now_s: float, current: LeaderRound) -> list[Action]:
        """All ranks keep what they have now."""
        books = self._books
        books.state = (
            states.overwritten(books.state) if current.in_place else states.settled(books.state, keep=True)
        )
        serving = books.serving
        books.membership.serve(serving)
        books.since_s = now_s
        books.ledger.published(serving)
        self._note_installed(current, serving)
        stall_s = max(ack.seconds for ack in current.acks.values())
        actions: list[Action] = self._settle(current, keep=True)
        if current.committer is not None:
            answer = m.Committed(serving=serving, undo=books.undo, stall_s=stall_s, ranks=current.times())
            actions.append(SendReply(*current.committer, answer))
        said = (
            events.RoundCommitted(**books.who(current), stall_s=stall_s)
            if current.asked is not None
            else events.RoundUndone(**books.who(current), serving=str(serving), stall_s=stall_s)
        )
        outcome = events.RoundOutcome.COMMITTED if current.asked is not None else events.RoundOutcome.UNDONE
        return [*actions, EmitEvent(said), self._end(now_s, current, "done", outcome)]

    def fail(self, now_s: float, current: LeaderRound, fault: Fault) -> list[Action]:
        """End it from any phase, at the old version or torn; ranks that exchanged are told to exchange back."""
        books = self._books
        committing = current.phase == "committing"
        fault, torn = self._fallen_to(current, fault)
        current.fault = fault
        actions: list[Action] = self._settle(current, keep=False) + torn
        if committing:
            actions.append(WithdrawDecision(current.id))
        if current.committer is not None:
            actions.append(SendReply(*current.committer, m.Refusal(fault=fault, serving=books.serving)))
        actions += [
            NotifyRank(rank, m.DropShadow(round=current.id))
            for rank in sorted(current.ranks & set(books.membership.members))
        ]
        aborted = events.RoundGivenUp(
            **books.who(current), rank=fault.rank, step=fault.step, code=fault.code, reason=fault.message
        )
        outcome = (
            events.RoundOutcome.TORN
            if isinstance(books.state, states.TornState)
            else events.RoundOutcome.ABORTED
        )
        return [*actions, EmitEvent(aborted), self._end(now_s, current, "failed", outcome)]

    def outcome(self, current: LeaderRound, *, keep: bool) -> m.Settled:
        """What a rank is told that exchanged, or overwrote, its weights."""
        torn = self._books.torn if current.in_place else None
        return m.Settled(keep=keep, serving=self._books.serving, torn=None if torn is None else torn.cause)

    def _settle(self, current: LeaderRound, *, keep: bool) -> list[Action]:
        outcome = self.outcome(current, keep=keep)
        return [SendReply(ack.peer, ack.call, outcome) for ack in current.acks.values()]

    def _fallen_to(self, current: LeaderRound, fault: Fault) -> tuple[Fault, list[Action]]:
        """Which state a failure leaves, what it is called then, and who is told of it."""
        books = self._books
        if current.in_place and current.phase == "committing":
            if not current.touched:
                books.state = states.untouched(books.state)
            else:
                cause = f"{books.replica} holds a mixture since {current.label} failed: {fault.message}"
                fault = fault_of(Torn(cause), step=fault.step, rank=fault.rank, waited_s=fault.waited_s)
                books.state = states.after_failure(books.state, fault.message)
        else:
            books.state = states.after_failure(books.state, fault.message)
            if fault.code == Torn.code and current.asked is not None:
                books.state = states.TornState(current.asked.version, fault.message)
        if isinstance(books.state, states.TornState):
            return fault, books.audits.torn(fault.to_error())
        books.audits.stayed()
        return fault, []

    def _note_installed(self, current: LeaderRound, serving: Version | None) -> None:
        """What the ranks hold from now on, so that it can be verified later."""
        audits, world = self._books.audits, self._books.world
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
        books = self._books
        books.close(current, phase)
        return EmitEvent(
            events.RoundEnded(
                **books.who(current),
                outcome=outcome,
                took_s=now_s - current.began_s,
                verified=current.asked is not None and current.asked.verify,
                serving=None if books.serving is None else str(books.serving),
            )
        )
