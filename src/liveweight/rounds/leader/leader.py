"""The leader of a replica: the one place that decides about its rounds. Pure: messages and time go in, actions come out.

Ranks never decide; a message with another round's id has no effect. The leader opens rounds and answers waiting calls. Reports of ranks
before the vote are staging_reports's, votes, commits, undos and aborts votes_and_commits's, the end of a round round_end's. Sockets,
threads and clocks are leader_server's; how all ranks learn of a decision at one step is rounds/boundary's.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    KeptDiffers,
    LiveWeightError,
    Torn,
    WrongState,
)
from liveweight.observe import events
from liveweight.plan.digest_sums import DigestSums
from liveweight.rounds import states
from liveweight.rounds.leader.audit import Audits
from liveweight.rounds.leader.membership import ManifestFit, Membership, fit_manifest
from liveweight.rounds.leader.notices import Notices
from liveweight.rounds.leader.replica_record import ReplicaRecord
from liveweight.rounds.leader.round_end import RoundEnd
from liveweight.rounds.leader.round_record import (
    NEVER,
    Action,
    EmitEvent,
    LeaderRound,
    NotifyRank,
    SendReply,
    WaitingCall,
)
from liveweight.rounds.leader.staging_reports import StagingReports
from liveweight.rounds.leader.votes_and_commits import VotesAndCommits
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire import messages as m
from liveweight.wire.messages.values import RoundId, fault_of

STEPS: dict[type, str] = {
    m.Join: "join",
    m.GetReplicaState: "open",
    m.Describe: "open",
    m.Open: "open",
    m.WaitFor: "stage",
    m.Compare: "verify",
    m.RequestVote: "vote",
    m.Commit: "commit",
    m.Swapped: "commit",
    m.Abort: "abort",
    m.Undo: "undo",
    m.Verify: "verify",
}
"""Which step of a round a refused message belongs to."""


class Leader:
    """Decides for one replica of `world` ranks. Used by one thread."""

    def __init__(self, *, replica: str, boot: str, world: int) -> None:
        self.membership = Membership(world)
        audits = Audits(replica, self.membership)
        self._record = ReplicaRecord(
            replica=replica, boot=boot, world=world, membership=self.membership, audits=audits
        )
        round_end = RoundEnd(self._record)
        self._round_end = round_end
        self._staging_reports, self._votes_and_commits = (
            StagingReports(self._record, round_end),
            VotesAndCommits(self._record, round_end),
        )
        self._notices = Notices(self._record, round_end)
        self._state_calls: list[WaitingCall] = []
        self.not_serving: Callable[[], str | None] = lambda: None
        """What the replica's engine does with requests if it does not serve them. Called on the leader's thread."""

    @property
    def state(self) -> states.State:
        """The state of the replica: of all its ranks."""
        return self._record.state

    # Messages.

    def on_message(self, now_s: float, peer: bytes, call: int, body: m.Message) -> list[Action]:
        """Handle a message of a publisher or a rank. A call that is not allowed is refused in the reply.

        Time goes first: a commit that was sent in time and is read after its vote lease is late.
        """
        actions = self.on_time(now_s) if now_s >= self.next_s() else []
        try:
            actions += self._handle(now_s, peer, call, body)
        except LiveWeightError as error:
            if call == 0:
                return [*actions, EmitEvent(events.PeerRefused(code=error.code, reason=str(error)))]
            fault = fault_of(error, step=STEPS.get(type(body), "ask"))
            return [*actions, SendReply(peer, call, m.Refusal(fault=fault, serving=self._record.serving))]
        return actions + self._answer_waiting(now_s)

    def _handle(self, now_s: float, peer: bytes, call: int, body: m.Message) -> list[Action]:
        record = self._record
        match body:
            case m.Join():
                return self._join(now_s, peer, call, body)
            case m.Staged() | m.Verified() | m.StagingFailed() | m.ShadowDropped():
                return self._staging_reports.on_report(now_s, peer, body)
            case m.Swapped():
                return self._votes_and_commits.on_swapped(now_s, peer, call, body)
            case m.GetReplicaState(wait_s=wait_s):
                self._state_calls.append(WaitingCall(peer, call, "open", now_s + wait_s))
                return []
            case m.Describe():
                return self._describe(now_s, peer, call, body)
            case m.Open():
                return self._open(now_s, peer, call, body)
            case m.WaitFor(round=round_id, until=until, wait_s=wait_s):
                record.find(round_id).waiters.append(WaitingCall(peer, call, until, now_s + wait_s))
                return []
            case m.Compare():
                return self._staging_reports.compare(now_s, peer, call, body)
            case m.RequestVote() | m.Commit() | m.Undo() | m.Abort():
                return self._votes_and_commits.decide(now_s, peer, call, body)
            case m.Verify():
                if record.torn is not None:
                    raise Torn(record.torn.cause)
                self._notices.check_awake("a verification")
                return record.audits.begin(now_s, peer, call, body)
            case m.LiveDigests():
                return record.audits.on_digests(now_s, peer, body)
            case m.Sleep() | m.Wake() | m.MarkBehind():
                return self._notices.on_message(peer, call, body)
            case _:
                raise WrongState("leading a replica", type(body).__name__)

    # Time and lost processes.

    @property
    def open_request(self) -> m.Open | None:
        """The message that opened the open round; None without a round, and for an undo."""
        return None if self._record.round is None else self._record.round.request

    @property
    def needs_ranks(self) -> bool:
        """Whether the death of a rank matters at once: a round is open, or an audit waits for ranks."""
        return self._record.round is not None or self._record.audits.waiting

    def next_s(self) -> float:
        """When `on_time` has something to do."""
        record = self._record
        rounds = [known.next_s() for known in (record.round, *record.ended.values()) if known is not None]
        waits = [waiter.ends_s for waiter in self._state_calls]
        return min([*rounds, *waits, record.audits.next_s()], default=NEVER)

    def on_time(self, now_s: float) -> list[Action]:
        """Time has passed: end vote leases, rounds and waits."""
        current = self._record.round
        late = [] if current is None or now_s < current.ends_s else self._late(now_s, current)
        return late + self._answer_waiting(now_s)

    def _late(self, now_s: float, current: LeaderRound) -> list[Action]:
        missing, waited_s = current.missing(), now_s - current.began_s
        rank = missing[0] if len(missing) == 1 else None
        who = "rank " + ", ".join(map(str, missing)) if missing else "the publisher"
        step = {"open": "stage", "staged": "verify", "committing": "commit"}.get(current.phase, "decide")
        expired: list[Action] = []
        if current.phase == "ready":
            expired = [EmitEvent(events.LeaseExpired(**self._record.facts(current), lease_s=current.lease_s))]
        error = DeadlineExceeded(f"{who} to {step}", waited_s)
        fault = fault_of(error, step=step, rank=rank, waited_s=waited_s)
        return expired + self._votes_and_commits.on_late(now_s, current, fault)

    def on_lost(self, now_s: float, rank: int) -> list[Action]:
        """A rank's process is gone. Its round fails; the replica is incomplete until the rank is replaced."""
        record = self._record
        member = self.membership.leave(rank)
        for ended in record.ended.values():
            ended.readers.discard(rank)
        actions = [] if member is None else record.audits.on_rank_lost(rank, member)
        if member is not None and record.round is not None:
            error = ChannelClosed(f"rank {rank} (process {member.pid}) is gone")
            fault = fault_of(error, step=record.round.phase, rank=rank)
            actions += self._votes_and_commits.on_rank_lost(now_s, record.round, rank, fault)
        return actions + self._answer_waiting(now_s)

    def on_publisher_lost(self, now_s: float) -> list[Action]:
        """The process that opened the round is gone. No commit will be requested any more; one that was requested is carried out."""
        current = self._record.round
        if current is None or current.request is None or current.phase == "committing":
            return []
        error = ChannelClosed(f"publisher {current.id.publisher} (process {current.request.pid}) is gone")
        fault = fault_of(error, step=current.phase)
        return self._round_end.fail(now_s, current, fault) + self._answer_waiting(now_s)

    def on_withdrawn(self, now_s: float, round_id: RoundId, *, waited: bool) -> list[Action]:
        """The answer to WithdrawDecision. `waited`: the boundary had not taken the decision yet."""
        return self._votes_and_commits.on_withdrawn(now_s, round_id, waited=waited) + self._answer_waiting(
            now_s
        )

    # Membership.

    def _join(self, now_s: float, peer: bytes, call: int, body: m.Join) -> list[Action]:
        record = self._record
        candidate = self.membership.candidate(peer, body)  # if this raises, nothing has changed
        actions = self.on_lost(now_s, body.rank) if body.rank in self.membership.members else []
        if record.round is not None:
            actions += self._votes_and_commits.on_rank_replaced(now_s, record.round)
        self.membership.adopt(candidate)
        record.ledger.published(body.serving)
        if self.membership.digest_sums is not None:
            record.ledger.forget_manifests()
            if record.torn is None:
                record.state, record.since_s = states.ServingState(self.membership.common_version()), now_s
        record.audits.on_joined(body, record.serving)
        seat = self.membership.members[body.rank].seat
        return [
            *actions,
            SendReply(peer, call, m.Joined(replica=record.replica, boot=record.boot, seat=seat)),
        ]

    # Before a round.

    def _replica_state(self, digest_sums: DigestSums, now_s: float) -> m.ReplicaState:
        record = self._record
        return m.ReplicaState(
            replica=record.replica,
            boot=record.boot,
            state=states.describe(record.state),
            expected=digest_sums.expected,
            serving=record.serving,
            undo=record.undo,
            round=record.round.id if record.round is not None else None,
            optional=self.membership.optional,
            kept=record.ledger.kept(record.serving),
            torn=None if record.torn is None else record.torn.cause,
            not_serving=self.not_serving(),
            serving_s=max(0.0, now_s - record.since_s),
            met=tuple(self.membership.handshakes),
        )

    def _describe(self, now_s: float, peer: bytes, call: int, body: m.Describe) -> list[Action]:
        """Compare manifests; with a kept set, also its digests with those of what is live, which the ranks are asked for."""
        record, kept = self._record, body.kept
        digest_sums = self.membership.whole()
        fit = fit_manifest(body.manifest, digest_sums, self.membership.optional, kept)
        if kept is not None:
            if record.torn is not None:
                raise Torn(record.torn.cause)
            self._notices.check_awake("a comparison of kept tensors")
            changed = record.audits.changed_since_start([t.name for t in kept.tensors if t.digest is None])
            if changed:
                raise KeptDiffers(changed, "were changed since the engine was started")
            digested = tuple(spec for spec in kept.tensors if spec.digest is not None)
            if digested:
                order = m.Verify(manifest=Manifest(tensors=digested), timeout_s=body.timeout_s)
                return record.audits.begin(
                    now_s, peer, call, order, lambda found: self._described(body.structure, fit, found)
                )
        record.ledger.note_fit(body.structure, fit)
        return [SendReply(peer, call, m.Described())]

    def _described(self, structure: str, fit: ManifestFit, found: m.Verdict) -> m.Message:
        """The answer to Describe, once the kept tensors are digested."""
        if found.match:
            self._record.ledger.note_fit(structure, fit)
            return m.Described()
        error = KeptDiffers([one.name for one in found.mismatches], "differ from the trainer's")
        return m.Refusal(fault=fault_of(error, step="open"), serving=self._record.serving)

    def _open(self, now_s: float, peer: bytes, call: int, body: m.Open) -> list[Action]:
        record, before = self._record, self._notices.give_up(now_s, body)
        record.check_free()
        body = msgspec.structs.replace(body, version=record.ledger.content_of(body))
        record.ledger.check(body)
        serving, sound = record.serving, not record.audits.damaged
        if sound and serving is not None and serving.digest is not None and _installed(serving, body.version):
            there = m.Opened(round=None, serving=serving, kept=record.ledger.kept(serving))
            confirmed = events.VersionConfirmed(replica=record.replica, version=str(serving))
            return [*before, EmitEvent(confirmed), SendReply(peer, call, there)]
        fit = record.ledger.fit(body)
        kept = fit.kept
        self._check_heals(kept)
        unchanged = (
            sound and serving is not None and serving.content_known and serving.digest == body.version.digest
        )
        opened, version = self._begin_round(now_s, body, unchanged=unchanged)
        record.ledger.note_kept(version, kept)
        order = m.Stage(
            round=opened.id,
            version=version,
            offer=body.offer,
            verify=body.verify,
            timeout_s=body.timeout_s,
            keep=fit.kept_tensors,
            unchanged=unchanged,
        )
        event = events.RoundOpened(
            **record.facts(opened), serving=None if serving is None else str(serving), kept=kept
        )
        answer = m.Opened(round=opened.id, serving=serving, kept=kept, in_place=opened.in_place)
        orders = [NotifyRank(rank, order) for rank in sorted(opened.ranks)]
        return [*before, EmitEvent(event), SendReply(peer, call, answer), *orders]

    def _check_heals(self, kept: tuple[str, ...]) -> None:
        """Refuse an offer that would keep tensors which may be a mixture."""
        torn = self._record.torn
        if torn is not None and not set(kept) <= set(self._record.ledger.kept(torn.target)):
            missing = ", ".join(kept)
            raise Torn(f"{states.describe(torn)}: only an offer that has its {missing}, too, heals it")

    def _begin_round(self, now_s: float, body: m.Open, *, unchanged: bool) -> tuple[LeaderRound, Version]:
        """Make the record of the round that is open from now on. Returns it, and the version it is for."""
        record, version = self._record, body.version
        round_id = RoundId(boot=record.boot, epoch=record.epoch + 1, publisher=body.publisher)
        if version.digest is None:  # content unknown: the round's id stands in for it
            version = msgspec.structs.replace(version, digest=f"{record.boot}/{round_id.epoch}")
        record.state = states.open_round(record.state, version, round_id)
        record.epoch = round_id.epoch
        ranks = frozenset(range(record.world))
        record.round = LeaderRound(
            id=round_id,
            label=str(body.version),
            request=body,
            began_s=now_s,
            ends_s=now_s + body.timeout_s,
            ranks=ranks,
            readers=set(ranks),
            fit=record.ledger.fit(body),
            in_place=self.membership.in_place and not unchanged,
            unchanged=unchanged,
        )
        return record.round, version

    # Waiting calls.

    def _answer_waiting(self, now_s: float) -> list[Action]:
        record = self._record
        actions: list[Action] = []
        for known in (record.round, *record.ended.values()):
            if known is not None:
                actions += [SendReply(w.peer, w.call, known.progress()) for w in known.take_answerable(now_s)]
                readers = tuple(sorted(known.readers))
                actions += [
                    SendReply(w.peer, w.call, m.Aborted(readers=readers))
                    for w in known.take_answerable_aborts(now_s)
                ]
        actions += record.audits.advance(now_s)
        waiting, self._state_calls = self._state_calls, []
        for waiter in waiting:
            if self.membership.digest_sums is not None:
                actions.append(
                    SendReply(
                        waiter.peer, waiter.call, self._replica_state(self.membership.digest_sums, now_s)
                    )
                )
            elif now_s >= waiter.ends_s:
                fault = fault_of(self.membership.incomplete(), step="inquire")
                actions.append(SendReply(waiter.peer, waiter.call, m.Refusal(fault=fault)))
            else:
                self._state_calls.append(waiter)
        return actions


def _installed(serving: Version, offered: Version) -> bool:
    """Whether nothing is left to do. The same version under another number is installed again, so that every rank knows the number."""
    return serving == offered and offered.number in (None, serving.number)
