"""The reports of ranks between the open and the vote, and the comparison of their digests with the offer's. Pure."""

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
    """Takes the reports of ranks for one replica's rounds."""

    def __init__(self, record: ReplicaRecord, round_end: RoundEnd) -> None:
        self._record, self._round_end = record, round_end

    def on_report(
        self, now_s: float, peer: bytes, body: m.Staged | m.Verified | m.StagingFailed | m.ShadowDropped
    ) -> list[Action]:
        """Take a rank's report. A report of another round, or one that comes too late in this round, has no effect."""
        record = self._record
        current = record.round if record.round is not None and record.round.id == body.round else None
        rank = body.fault.rank if isinstance(body, m.StagingFailed) else body.rank
        member = None if rank is None else record.membership.members.get(rank)
        if member is None or member.peer != peer:
            return []  # a replaced process does not count any more
        match body:
            case m.ShadowDropped(rank=rank):
                ended = record.ended.get(body.round)
                if ended is not None:
                    ended.readers.discard(rank)
            case m.Staged(rank=rank) if current is not None and current.phase == "open":
                if not current.in_place:  # in place, the rank reads during the commit
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
        """Take the digests of a round that was opened without them. Ranks may have verified already, or not yet."""
        record = self._record
        current = record.find(body.round)
        request = current.request
        if current.over:
            return [SendReply(peer, call, m.Compared())]  # `WaitFor` says why it ended
        awaited = "verified" if current.in_place else "staged"
        if request is None or request.digests is not None or not request.verify or current.phase != awaited:
            raise WrongState(f"{current.phase} ({states.describe(record.state)})", "compare")
        complete = msgspec.structs.replace(request, digests=body.digests)
        record.ledger.digests(complete)  # raises if they do not fit its tensors
        current.request = complete
        actions: list[Action] = [SendReply(peer, call, m.Compared())]
        if current.in_place or current.missing():
            return actions
        return [*actions, *self._all_verified(now_s, current)]

    def _all_staged(self, now_s: float, current: LeaderRound) -> list[Action]:
        current.phase = "staged"
        digested = not current.in_place and not current.unchanged
        if current.request is not None and current.request.verify and digested:
            return [] if current.missing() else self._all_verified(now_s, current)
        current.phase = "verified"
        return []

    def _all_verified(self, now_s: float, current: LeaderRound) -> list[Action]:
        if current.request is not None and current.request.digests is None:
            return []  # a ring's digests come with Compare, once all ranks have staged
        error = differing(self._record, current, "shadow")
        if error is not None:
            return self._round_end.fail(now_s, current, fault_of(error, step="verify"))
        current.phase = "verified"
        return [
            EmitEvent(
                events.RankVerified(**self._record.facts(current), took_s=max(current.verify_s.values()))
            )
        ]


def differing(record: ReplicaRecord, current: LeaderRound, where: str) -> DigestMismatch | None:
    """How the digests of all ranks differ from the offer's. Both must be known."""
    digest_sums, request = record.membership.whole(), current.request
    offered = None if request is None else record.ledger.digests(request)
    if request is None or offered is None:
        raise WrongState(states.describe(record.state), "verify")
    totals, disagreeing = digest_sums.combine([current.lanes[rank] for rank in range(record.world)])
    found = disagreeing or digest_sums.differing(totals, offered, record.ledger.fit(request).sources)
    return DigestMismatch(found, f"{record.replica}, {where}") if found else None
