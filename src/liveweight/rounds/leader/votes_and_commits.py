"""Votes, commits, undos and aborts, and the reports of ranks about a swap. Pure.

A commit in place is decided when every rank has reported or cannot report any more: only all ranks together know whether the old
weights are whole.
"""

from __future__ import annotations

from liveweight.errors import LiveWeightError, MessageInvalid, RoundAborted, WrongState
from liveweight.observe import events
from liveweight.rounds import states
from liveweight.rounds.leader.replica_record import ReplicaRecord
from liveweight.rounds.leader.round_end import RoundEnd
from liveweight.rounds.leader.round_record import (
    NEVER,
    Action,
    EmitEvent,
    LeaderRound,
    NotifyRank,
    PutDecision,
    SendReply,
    SwapAck,
    WaitingCall,
    WithdrawDecision,
)
from liveweight.rounds.leader.staging_reports import differing
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, RoundId, fault_of


class VotesAndCommits:
    """Decides the rounds of one replica, once ranks have staged and verified."""

    def __init__(self, record: ReplicaRecord, round_end: RoundEnd) -> None:
        self._record, self._round_end = record, round_end

    # Calls of publishers.

    def decide(
        self, now_s: float, peer: bytes, call: int, body: m.RequestVote | m.Commit | m.Undo | m.Abort
    ) -> list[Action]:
        """Handle a publisher's call about a round, or about the version that serves."""
        record = self._record
        match body:
            case m.RequestVote(round=round_id) | m.Commit(round=round_id) if (
                round_id in record.failed_by_rank()
            ):
                return [
                    SendReply(
                        peer, call, m.Refusal(fault=record.failed_by_rank()[round_id], serving=record.serving)
                    )
                ]
            case m.RequestVote():
                return self._vote(now_s, peer, call, body)
            case m.Commit(round=round_id, timeout_s=timeout_s):
                current = record.current(round_id, "commit")
                begin = states.overwrite if current.in_place else states.begin_swap
                record.state = begin(record.state)
                return self._swap(now_s, current, (peer, call), timeout_s)
            case m.Undo():
                return self._undo(now_s, peer, call, body)
            case m.Abort(round=round_id, reason=reason, wait_s=wait_s):
                named = record.find(round_id)
                if named.phase in ("committing", "done"):
                    raise WrongState(states.describe(record.state), "abort")
                named.aborters.append(WaitingCall(peer, call, "failed", now_s + wait_s))
                fault = fault_of(RoundAborted(reason), step=named.phase)
                return [] if named.over else self._round_end.fail(now_s, named, fault)

    def _vote(self, now_s: float, peer: bytes, call: int, body: m.RequestVote) -> list[Action]:
        record, lease_s = self._record, body.lease_s
        current = record.current(body.round, "vote")
        request = current.request
        unknown = request is not None and request.verify and request.digests is None
        if current.phase != "verified" or unknown:
            raise WrongState(states.describe(record.state), "vote")
        record.state = states.verified(record.state)
        current.phase, current.lease_s, current.ends_s = "ready", lease_s, now_s + lease_s
        return [
            SendReply(peer, call, m.Vote()),
            EmitEvent(events.VoteCast(**record.facts(current), lease_s=lease_s)),
        ]

    def _undo(self, now_s: float, peer: bytes, call: int, body: m.Undo) -> list[Action]:
        record = self._record
        record.check_free()
        if record.membership.in_place and isinstance(record.state, states.ServingState):
            raise WrongState(f"{states.describe(record.state)}, in place of the version before", "undo")
        round_id = RoundId(boot=record.boot, epoch=record.epoch + 1, publisher=body.publisher)
        label = str(record.serving)
        record.state = states.begin_undo(record.state, round_id)
        record.epoch += 1
        ranks = frozenset(range(record.world))
        record.round = LeaderRound(
            id=round_id, label=label, request=None, began_s=now_s, ends_s=now_s, ranks=ranks
        )
        return self._swap(now_s, record.round, (peer, call), body.timeout_s)

    def _swap(
        self, now_s: float, current: LeaderRound, committer: tuple[bytes, int], timeout_s: float
    ) -> list[Action]:
        current.phase, current.committer, current.ends_s = "committing", committer, now_s + timeout_s
        policy = None if current.request is None else current.request.kv_policy
        self._record.audits.on_swap_decided()
        return [PutDecision(current.id, current.request is None, timeout_s, policy)]

    # Reports of ranks.

    def on_swapped(self, now_s: float, peer: bytes, call: int, body: m.Swapped) -> list[Action]:
        """A rank has carried out a decision, or has failed to, and requests the outcome."""
        record, current = self._record, self._record.round
        ours = body.boot == record.boot
        if current is None or not ours or current.id.epoch != body.epoch or current.phase != "committing":
            ended = next((r for r in record.ended.values() if ours and r.id.epoch == body.epoch), None)
            if ended is None:
                raise WrongState("without a record of that round", "an outcome")
            return [SendReply(peer, call, self._round_end.outcome(ended, keep=ended.phase == "done"))]
        member = record.membership.members.get(body.rank)
        if member is None or member.seat != body.seat:
            raise WrongState(f"rank {body.rank} is another process by now", "a swap of weights")
        current.acks[body.rank] = SwapAck(peer, call, body.seconds, body.unread)
        if current.in_place:
            current.overwrote(body.rank, body.overwritten, member.layout)
            stopping = [] if body.fault is None else self._stop_overwriting(current, body.fault)
            return stopping + self._overwritten(now_s, current)
        if body.fault is not None:
            return self._round_end.fail(now_s, current, body.fault)
        return [] if current.missing() else self._round_end.done(now_s, current)

    def on_rank_lost(self, now_s: float, current: LeaderRound, rank: int, fault: Fault) -> list[Action]:
        """A rank of the round is gone."""
        current.readers.discard(rank)
        current.gone.add(rank)
        return self._broken(now_s, current, fault)

    def on_late(self, now_s: float, current: LeaderRound, fault: Fault) -> list[Action]:
        """The time of the round's phase is over."""
        current.late, current.ends_s = True, NEVER
        return self._broken(now_s, current, fault)

    def on_rank_replaced(self, now_s: float, current: LeaderRound) -> list[Action]:
        """A rank joins in the place of a lost one, whose report will never come."""
        return [] if current.fault is None else self._round_end.fail(now_s, current, current.fault)

    def _broken(self, now_s: float, current: LeaderRound, fault: Fault) -> list[Action]:
        if current.in_place and current.phase == "committing":
            return self._stop_overwriting(current, fault)
        return self._round_end.fail(now_s, current, fault)

    # In place.

    def _stop_overwriting(self, current: LeaderRound, fault: Fault) -> list[Action]:
        """The commit fails: ranks that have not begun must not begin, the others may stop. Their reports are still to come."""
        current.fault = current.fault or fault
        waited_for = set(current.missing()) & set(self._record.membership.members)
        return [
            WithdrawDecision(current.id),
            *(NotifyRank(rank, m.DropShadow(round=current.id)) for rank in sorted(waited_for)),
        ]

    def on_withdrawn(self, now_s: float, round_id: RoundId, *, waited: bool) -> list[Action]:
        """The answer to WithdrawDecision. If the decision did not wait any more, the ranks have it, or had it."""
        current = self._record.round
        if current is None or current.id != round_id:
            return []
        current.taken = not waited
        return self._overwritten(now_s, current)

    def _overwritten(self, now_s: float, current: LeaderRound) -> list[Action]:
        """End the commit once every rank has reported or cannot report any more."""
        if current.missing() and current.taken and not current.late:
            return []
        if current.fault is None and current.request is not None and current.request.verify:
            error: LiveWeightError | None = MessageInvalid("a rank did not say what it holds now")
            if len(current.lanes) == self._record.world:
                error = differing(self._record, current, "overwritten in place")
            current.fault = None if error is None else fault_of(error, step="verify")
        if current.fault is not None:
            return self._round_end.fail(now_s, current, current.fault)
        return self._round_end.done(now_s, current)
