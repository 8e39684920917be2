"""Gathering: what ranks report between the open and the vote, and whether it is what was offered. Pure."""

from __future__ import annotations

import msgspec

from liveweight.errors import DigestMismatch, WrongState
from liveweight.observe import events
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.rounds import states
from liveweight.rounds.leader.replica_record import ReplicaRecord
from liveweight.rounds.leader.round_end import RoundEnd
from liveweight.rounds.leader.round_record import Action, EmitEvent, LeaderRound, SendReply
from liveweight.wire import messages as m
from liveweight.wire.messages.values import fault_of


class StagingReports:
    """Takes reports for the rounds of one replica."""

    def __init__(self, record: ReplicaRecord, round_end: RoundEnd) -> None:
        self._record, self._round_end = record, round_end

    def reported(
        self, now_s: float, peer: bytes, body: m.Staged | m.Verified | m.StagingFailed | m.ShadowDropped
    ) -> list[Action]:
        """How far a rank came. Of another round, or too late in this one, it has no effect."""
        record = self._record
        current = record.round if record.round is not None and record.round.id == body.round else None
        rank = body.fault.rank if isinstance(body, m.StagingFailed) else body.rank
        member = None if rank is None else record.membership.members.get(rank)
        if member is None or member.peer != peer:
            return []  # a process that was replaced has no say any more
        match body:
            case m.ShadowDropped(rank=rank):
                ended = record.ended.get(body.round)
                if ended is not None:
                    ended.readers.discard(rank)
            case m.Staged(rank=rank) if current is not None and current.phase == "open":
                if not current.in_place:  # else it has still to read
                    current.readers.discard(rank)
                current.staged[rank] = (body.size_bytes, body.seconds)
                if not current.missing():
                    return self._all_staged(now_s, current)
            case m.Verified(rank=rank) if current is not None and current.phase in ("open", "staged"):
                current.lanes[rank] = lanes_from_bytes(body.lanes, len(member.layout.placements))
                current.verify_s[rank] = body.seconds
                if current.phase == "staged" and not current.missing():
                    return self._all_verified(now_s, current)
            case m.StagingFailed(fault=fault) if current is not None and current.phase in ("open", "staged"):
                if fault.rank is not None:
                    current.readers.discard(fault.rank)
                return self._round_end.fail(now_s, current, fault)
            case _:
                pass
        return []

    def compare(self, now_s: float, peer: bytes, call: int, body: m.Compare) -> list[Action]:
        """The digests of a round that was opened without them, told once. Ranks may have verified already, or not yet."""
        record = self._record
        current = record.named(body.round)
        asked = current.asked
        if current.over:
            return [SendReply(peer, call, m.Compared())]  # why it ended, `WaitFor` tells
        awaited = "verified" if current.in_place else "staged"
        if asked is None or asked.digests is not None or not asked.verify or current.phase != awaited:
            raise WrongState(f"{current.phase} ({states.describe(record.state)})", "compare")
        told = msgspec.structs.replace(asked, digests=body.digests)
        record.ledger.digests(told)  # refused here if they are not of its tensors
        current.asked = told
        actions: list[Action] = [SendReply(peer, call, m.Compared())]
        if current.in_place or current.missing():
            return actions
        return [*actions, *self._all_verified(now_s, current)]

    def _all_staged(self, now_s: float, current: LeaderRound) -> list[Action]:
        current.phase = "staged"
        if current.asked is not None and current.asked.verify and not current.in_place:
            return [] if current.missing() else self._all_verified(now_s, current)
        current.phase = "verified"
        return []

    def _all_verified(self, now_s: float, current: LeaderRound) -> list[Action]:
        if current.asked is not None and current.asked.digests is None:
            return []  # a ring's are told when all have staged
        error = differing(self._record, current, "shadow")
        if error is not None:
            return self._round_end.fail(now_s, current, fault_of(error, step="verify"))
        current.phase = "verified"
        return [
            EmitEvent(events.RankVerified(**self._record.who(current), took_s=max(current.verify_s.values())))
        ]


def differing(record: ReplicaRecord, current: LeaderRound, where: str) -> DigestMismatch | None:
    """How what all ranks say that they hold differs from what was offered; both are known."""
    digest_sums, asked = record.membership.whole(), current.asked
    offered = None if asked is None else record.ledger.digests(asked)
    if asked is None or offered is None:
        raise WrongState(states.describe(record.state), "verify")
    totals, disagreeing = digest_sums.combine([current.lanes[rank] for rank in range(record.world)])
    found = disagreeing or digest_sums.differing(totals, offered, record.ledger.fit(asked).sources)
    return DigestMismatch(found, f"{record.replica}, {where}") if found else None
