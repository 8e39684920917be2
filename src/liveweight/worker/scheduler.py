"""The scheduler of a replica's rounds: the one place that decides. Pure: told of messages and of time, it answers with actions.

Ranks never decide; a message with another round's id has no effect. A round ends in exactly one of two ways: every rank keeps the
new weights, or every rank has the old ones. Sockets, threads and clocks are leader's; where ranks meet is the boundary's.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    DigestMismatch,
    LiveWeightError,
    MessageInvalid,
    RoundAborted,
    RoundOpen,
    Torn,
    WrongState,
)
from liveweight.observe import events
from liveweight.plan.tally import Tally, lanes_from_bytes
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.values import Fault, RoundId, fault_of
from liveweight.worker import states
from liveweight.worker.audit import Audits
from liveweight.worker.membership import Ledger, Membership
from liveweight.worker.references import of_round
from liveweight.worker.rounds import Ack, Action, Decide, Reply, Round, Say, Tell, Waiter, Withdraw

REMEMBERED = 64
NEVER = float("inf")
STEPS: dict[type, str] = {
    m.Join: "join",
    m.Inquire: "open",
    m.Describe: "open",
    m.Open: "open",
    m.Await: "stage",
    m.Compare: "verify",
    m.Ask: "vote",
    m.Commit: "commit",
    m.Swapped: "commit",
    m.Abort: "abort",
    m.Undo: "undo",
    m.Verify: "verify",
}
"""Which step of a round a refused message belongs to."""


class Scheduler:
    """Decides for one replica of `world` ranks. Used by one thread."""

    def __init__(self, *, replica: str, boot: str, world: int) -> None:
        self.replica, self.boot, self.world = replica, boot, world
        self.membership = Membership(world)
        self.state: states.State = states.Serving(None)
        self._epoch = 0
        self._round: Round | None = None
        self._ledger = Ledger()
        self._audits = Audits(replica, self.membership)
        self._ended: OrderedDict[RoundId, Round] = OrderedDict()
        self._inquirers: list[Waiter] = []

    # What peers say.

    def on_message(self, now_s: float, peer: bytes, call: int, body: m.Message) -> list[Action]:
        """A message of a publisher or a rank. What it may not do is refused in the reply.

        Time goes first: a commit that was sent in time and is read after its lease is late.
        """
        actions = self.on_time(now_s) if now_s >= self.next_s() else []
        try:
            actions += self._handle(now_s, peer, call, body)
        except LiveWeightError as error:
            if call == 0:
                return [*actions, Say(events.PeerRefused(code=error.code, reason=str(error)))]
            fault = fault_of(error, step=STEPS.get(type(body), "ask"))
            serving = states.serving_version(self.state)
            return [*actions, Reply(peer, call, m.Refusal(fault=fault, serving=serving))]
        return actions + self._answered(now_s)

    def _handle(self, now_s: float, peer: bytes, call: int, body: m.Message) -> list[Action]:
        match body:
            case m.Join():
                return self._join(now_s, peer, call, body)
            case m.Staged() | m.Verified() | m.Failed() | m.Dropped():
                return self._from_rank(now_s, peer, body)
            case m.Swapped():
                return self._swapped(now_s, peer, call, body)
            case m.Inquire(wait_s=wait_s):
                self._inquirers.append(Waiter(peer, call, "open", now_s + wait_s))
                return []
            case m.Describe(structure=structure, manifest=manifest):
                tally = self.membership.whole()
                self._ledger.describe(structure, manifest, tally, self.membership.optional)
                return [Reply(peer, call, m.Described())]
            case m.Open():
                return self._open(now_s, peer, call, body)
            case m.Await(round=round_id, until=until, wait_s=wait_s):
                self._named(round_id).waiters.append(Waiter(peer, call, until, now_s + wait_s))
                return []
            case m.Compare():
                return self._compare(now_s, peer, call, body)
            case m.Ask() | m.Commit() | m.Undo() | m.Abort():
                return self._decision(now_s, peer, call, body)
            case m.Verify():
                torn = states.torn_by(self.state)
                if torn is not None:
                    raise Torn(torn.cause)
                return self._audits.begin(now_s, peer, call, body)
            case m.Digested():
                return self._audits.digested(now_s, peer, body)
            case _:
                raise WrongState("leading a replica", type(body).__name__)

    def on_time(self, now_s: float) -> list[Action]:
        """Time has passed: leases, rounds and waits end."""
        actions: list[Action] = []
        current = self._round
        if current is not None and now_s >= current.ends_s:
            actions += self._late(now_s, current)
        return actions + self._answered(now_s)

    @property
    def needs_ranks(self) -> bool:
        """Whether it matters at once that a rank dies: a round is open, or ranks are asked what they hold."""
        return self._round is not None or self._audits.waiting

    def next_s(self) -> float:
        """When `on_time` has something to do."""
        rounds = [r.next_s() for r in (self._round, *self._ended.values()) if r is not None]
        return min([*rounds, *(w.ends_s for w in self._inquirers), self._audits.next_s()], default=NEVER)

    def on_lost(self, now_s: float, rank: int) -> list[Action]:
        """A rank's process is gone. Its round fails; the replica is incomplete until the rank is replaced."""
        member = self.membership.leave(rank)
        for ended in self._ended.values():
            ended.readers.discard(rank)
        actions = [] if member is None else self._audits.lost(rank, member)
        if member is None or self._round is None:
            return actions + self._answered(now_s)
        self._round.readers.discard(rank)
        error = ChannelClosed(f"rank {rank} (process {member.pid}) is gone")
        fault = fault_of(error, step=self._round.phase, rank=rank)
        if self._round.in_place and self._round.phase == "committing":
            self._round.gone.add(rank)
            actions += self._stop_overwriting(self._round, fault)
        else:
            actions += self._fail(now_s, self._round, fault)
        return actions + self._answered(now_s)

    @property
    def asked(self) -> m.Open | None:
        """What the round that is open was opened with; None without one, and for an undo."""
        return None if self._round is None else self._round.asked

    def on_publisher_lost(self, now_s: float) -> list[Action]:
        """The process that opened the round is gone. Nobody will ask for its commit; one that was asked for is carried out."""
        current = self._round
        if current is None or current.asked is None or current.phase == "committing":
            return []
        error = ChannelClosed(f"publisher {current.id.publisher} (process {current.asked.pid}) is gone")
        return self._fail(now_s, current, fault_of(error, step=current.phase)) + self._answered(now_s)

    # Membership.

    def _join(self, now_s: float, peer: bytes, call: int, body: m.Join) -> list[Action]:
        candidate = self.membership.candidate(peer, body)  # refused here, nothing has changed
        actions = self.on_lost(now_s, body.rank) if body.rank in self.membership.members else []
        if self._round is not None and self._round.fault is not None:  # in place: the others will hear it
            actions += self._fail(now_s, self._round, self._round.fault)
        self.membership.adopt(candidate)
        self._ledger.published(body.serving)
        if self.membership.tally is not None and states.torn_by(self.state) is None:
            self.state = states.Serving(self.membership.common_version())
            self._ledger.forget_manifests()
        self._audits.joined(body, states.serving_version(self.state))
        seat = self.membership.members[body.rank].seat
        return [*actions, Reply(peer, call, m.Joined(replica=self.replica, boot=self.boot, seat=seat))]

    # Before a round.

    def _standing(self, tally: Tally) -> m.Standing:
        undo = self.state.undo if isinstance(self.state, states.Serving) else None
        return m.Standing(
            replica=self.replica,
            boot=self.boot,
            state=states.describe(self.state),
            expected=tally.expected,
            serving=states.serving_version(self.state),
            undo=undo,
            round=self._round.id if self._round is not None else None,
            optional=self.membership.optional,
            kept=self._ledger.kept(states.serving_version(self.state)),
            torn=None if (torn := states.torn_by(self.state)) is None else torn.cause,
        )

    def _open(self, now_s: float, peer: bytes, call: int, body: m.Open) -> list[Action]:
        self.membership.whole()
        if self._round is not None:
            raise RoundOpen(self.replica, self._round.id.publisher)
        self._ledger.check(body)
        serving = states.serving_version(self.state)
        if serving is not None and serving.digest is not None and serving == body.version:
            kept = self._ledger.kept(serving)
            return [Reply(peer, call, m.Opened(round=None, serving=serving, kept=kept))]
        self._epoch += 1
        round_id = RoundId(boot=self.boot, epoch=self._epoch, publisher=body.publisher)
        version = body.version
        if version.digest is None:  # content unknown: the round's id stands in for it
            version = msgspec.structs.replace(version, digest=f"{self.boot}/{self._epoch}")
        kept = self._ledger.fit(body).kept
        torn = states.torn_by(self.state)
        if torn is not None and not set(kept) <= set(self._ledger.kept(torn.target)):
            raise Torn(
                f"{states.describe(torn)}: only an offer that has its {', '.join(kept)}, too, heals it"
            )
        self.state = states.open_round(self.state, version, round_id)
        self._ledger.keeps(version, kept)
        opened = self._begun(now_s, round_id, body)
        order = m.Stage(
            round=round_id,
            version=version,
            offer=body.offer,
            verify=body.verify,
            timeout_s=body.timeout_s,
            keep=kept,
        )
        said = events.RoundOpened(
            **self._who(opened), serving=None if serving is None else str(serving), kept=kept
        )
        return [
            Say(said),
            Reply(peer, call, m.Opened(round=round_id, serving=serving, kept=kept, in_place=opened.in_place)),
            *(Tell(rank, order) for rank in sorted(opened.ranks)),
        ]

    def _begun(self, now_s: float, round_id: RoundId, body: m.Open) -> Round:
        """The record of the round that holds the replica from now on."""
        ranks = frozenset(range(self.world))
        self._round = Round(
            id=round_id,
            label=str(body.version),
            asked=body,
            began_s=now_s,
            ends_s=now_s + body.timeout_s,
            ranks=ranks,
            readers=set(ranks),
            fit=self._ledger.fit(body),
            in_place=self.membership.in_place,
        )
        return self._round

    # What ranks report.

    def _from_rank(
        self, now_s: float, peer: bytes, body: m.Staged | m.Verified | m.Failed | m.Dropped
    ) -> list[Action]:
        current = self._round if self._round is not None and self._round.id == body.round else None
        rank = body.fault.rank if isinstance(body, m.Failed) else body.rank
        member = None if rank is None else self.membership.members.get(rank)
        if member is None or member.peer != peer:
            return []  # a process that was replaced has no say any more
        match body:
            case m.Dropped(rank=rank):
                ended = self._ended.get(body.round)
                if ended is not None:
                    ended.readers.discard(rank)
            case m.Staged(rank=rank) if current is not None and current.phase == "open":
                if not current.in_place:  # else it has still to read
                    current.readers.discard(rank)
                current.staged[rank] = (body.size_bytes, body.seconds)
                if not current.missing():
                    return self._all_staged(now_s, current)
            case m.Verified(rank=rank) if current is not None and current.phase in ("open", "staged"):
                current.lanes[rank] = lanes_from_bytes(
                    body.lanes, len(self.membership.members[rank].layout.placements)
                )
                current.verify_s[rank] = body.seconds
                if current.phase == "staged" and not current.missing():
                    return self._all_verified(now_s, current)
            case m.Failed(fault=fault) if current is not None and current.phase in ("open", "staged"):
                if fault.rank is not None:
                    current.readers.discard(fault.rank)
                return self._fail(now_s, current, fault)
            case _:
                pass
        return []

    def _all_staged(self, now_s: float, current: Round) -> list[Action]:
        current.phase = "staged"
        if current.asked is not None and current.asked.verify and not current.in_place:
            return [] if current.missing() else self._all_verified(now_s, current)
        current.phase = "verified"
        return []

    def _compare(self, now_s: float, peer: bytes, call: int, body: m.Compare) -> list[Action]:
        """The digests of a round that was opened without them, told once. Ranks may have verified already, or not yet."""
        current = self._named(body.round)
        asked = current.asked
        if current.over:
            return [Reply(peer, call, m.Compared())]  # why it ended, `Await` tells
        awaited = "verified" if current.in_place else "staged"
        if asked is None or asked.digests is not None or not asked.verify or current.phase != awaited:
            raise WrongState(f"{current.phase} ({states.describe(self.state)})", "compare")
        told = msgspec.structs.replace(asked, digests=body.digests)
        self._ledger.digests(told)  # refused here if they are not of its tensors
        current.asked = told
        actions: list[Action] = [Reply(peer, call, m.Compared())]
        if current.in_place or current.missing():
            return actions
        return [*actions, *self._all_verified(now_s, current)]

    def _differing(self, current: Round, where: str) -> DigestMismatch | None:
        """How what the ranks hold differs from what was offered; both are known."""
        tally, asked = self.membership.whole(), current.asked
        offered = None if asked is None else self._ledger.digests(asked)
        if asked is None or offered is None:
            raise WrongState(states.describe(self.state), "verify")
        totals, disagreeing = tally.combine([current.lanes[rank] for rank in range(self.world)])
        differing = disagreeing or tally.differing(totals, offered, self._ledger.fit(asked).sources)
        return DigestMismatch(differing, f"{self.replica}, {where}") if differing else None

    def _all_verified(self, now_s: float, current: Round) -> list[Action]:
        if current.asked is not None and current.asked.digests is None:
            return []  # a ring's are told when all have staged
        error = self._differing(current, "shadow")
        if error is not None:
            return self._fail(now_s, current, fault_of(error, step="verify"))
        current.phase = "verified"
        return [Say(events.Verified(**self._who(current), took_s=max(current.verify_s.values())))]

    # Decisions.

    def _decision(
        self, now_s: float, peer: bytes, call: int, body: m.Ask | m.Commit | m.Undo | m.Abort
    ) -> list[Action]:
        match body:
            case m.Ask(round=round_id) | m.Commit(round=round_id) if round_id in self._fallen():
                fault, serving = self._fallen()[round_id], states.serving_version(self.state)
                return [Reply(peer, call, m.Refusal(fault=fault, serving=serving))]
            case m.Ask(round=round_id, lease_s=lease_s):
                current = self._current(round_id, "vote")
                asked = current.asked
                unknown = asked is not None and asked.verify and asked.digests is None
                if current.phase != "verified" or unknown:
                    raise WrongState(states.describe(self.state), "vote")
                self.state = states.verified(self.state)
                current.phase, current.lease_s, current.ends_s = "ready", lease_s, now_s + lease_s
                vote = events.Voted(**self._who(current), lease_s=lease_s)
                return [Reply(peer, call, m.Voted()), Say(vote)]
            case m.Commit(round=round_id, timeout_s=timeout_s):
                current = self._current(round_id, "commit")
                begin = states.overwrite if current.in_place else states.begin_swap
                self.state = begin(self.state)
                return self._swap(now_s, current, peer, call, timeout_s, undo=False)
            case m.Undo(publisher=publisher, timeout_s=timeout_s):
                return self._undo(now_s, peer, call, publisher, timeout_s)
            case m.Abort(round=round_id, reason=reason, wait_s=wait_s):
                named = self._named(round_id)
                if named.phase in ("committing", "done"):
                    raise WrongState(states.describe(self.state), "abort")
                named.aborters.append(Waiter(peer, call, "failed", now_s + wait_s))
                fault = fault_of(RoundAborted(reason), step=named.phase)
                return [] if named.over else self._fail(now_s, named, fault)

    def _undo(self, now_s: float, peer: bytes, call: int, publisher: str, timeout_s: float) -> list[Action]:
        self.membership.whole()
        if self._round is not None:
            raise RoundOpen(self.replica, self._round.id.publisher)
        if self.membership.in_place and isinstance(self.state, states.Serving):
            raise WrongState(f"{states.describe(self.state)}, in place of the version before", "undo")
        round_id = RoundId(boot=self.boot, epoch=self._epoch + 1, publisher=publisher)
        label = str(states.serving_version(self.state))
        self.state = states.begin_undo(self.state, round_id)
        self._epoch += 1
        ranks = frozenset(range(self.world))
        self._round = Round(id=round_id, label=label, asked=None, began_s=now_s, ends_s=now_s, ranks=ranks)
        return self._swap(now_s, self._round, peer, call, timeout_s, undo=True)

    def _swap(
        self, now_s: float, current: Round, peer: bytes, call: int, timeout_s: float, *, undo: bool
    ) -> list[Action]:
        current.phase, current.committer, current.ends_s = "committing", (peer, call), now_s + timeout_s
        policy = None if current.asked is None else current.asked.kv_policy
        self._audits.exchanging()
        return [Decide(current.id, undo, timeout_s, policy)]

    def _swapped(self, now_s: float, peer: bytes, call: int, body: m.Swapped) -> list[Action]:
        current = self._round
        ours = body.boot == self.boot
        if current is None or not ours or current.id.epoch != body.epoch or current.phase != "committing":
            ended = next((r for r in self._ended.values() if ours and r.id.epoch == body.epoch), None)
            if ended is None:
                raise WrongState("without a record of that round", "an outcome")
            return [Reply(peer, call, self._outcome(ended, keep=ended.phase == "done"))]
        member = self.membership.members.get(body.rank)
        if member is None or member.seat != body.seat:
            raise WrongState(f"rank {body.rank} is another process by now", "an exchange of weights")
        current.acks[body.rank] = Ack(peer, call, body.seconds)
        if current.in_place:
            return self._overwrote(now_s, current, body)
        if body.fault is not None:
            return self._fail(now_s, current, body.fault)
        return [] if current.missing() else self._done(now_s, current)

    # In place.

    def _overwrote(self, now_s: float, current: Round, body: m.Swapped) -> list[Action]:
        """How far a rank came. All are heard before it is decided: whether the old weights are whole is known from all of them alone."""
        current.overwrote(body.rank, body.overwritten, self.membership.members[body.rank].layout)
        actions = [] if body.fault is None else self._stop_overwriting(current, body.fault)
        return actions + self._overwritten(now_s, current)

    def _stop_overwriting(self, current: Round, fault: Fault) -> list[Action]:
        """It fails: who has not begun must not, who has may stop; how far each came is still to be heard."""
        current.fault = current.fault or fault
        waited_for = set(current.missing()) & set(self.membership.members)
        return [Withdraw(current.id), *(Tell(rank, m.Drop(round=current.id)) for rank in sorted(waited_for))]

    def on_withdrawn(self, now_s: float, round_id: RoundId, *, waited: bool) -> list[Action]:
        """A decision was taken back that still waited, or too late: then the ranks have it, or had it."""
        current = self._round
        if current is None or current.id != round_id:
            return []
        current.taken = not waited
        return self._overwritten(now_s, current) + self._answered(now_s)

    def _overwritten(self, now_s: float, current: Round) -> list[Action]:
        """Decide, once every rank was heard or nobody can be any more."""
        if current.missing() and current.taken and not current.late:
            return []
        if current.fault is None and current.asked is not None and current.asked.verify:
            error: LiveWeightError | None = MessageInvalid("a rank did not say what it holds now")
            if len(current.lanes) == self.world:
                error = self._differing(current, "overwritten in place")
            current.fault = None if error is None else fault_of(error, step="verify")
        return (
            self._done(now_s, current) if current.fault is None else self._fail(now_s, current, current.fault)
        )

    # How a round ends.

    def _done(self, now_s: float, current: Round) -> list[Action]:
        self.state = (
            states.overwritten(self.state) if current.in_place else states.settled(self.state, keep=True)
        )
        serving = states.serving_version(self.state)
        undo = self.state.undo if isinstance(self.state, states.Serving) else None
        self.membership.serve(serving)
        self._ledger.published(serving)
        self._note_installed(current, serving)
        stall_s = max(ack.seconds for ack in current.acks.values())
        actions: list[Action] = self._settle(current, keep=True)
        if current.committer is not None:
            answer = m.Committed(serving=serving, undo=undo, stall_s=stall_s, ranks=current.times())
            actions.append(Reply(*current.committer, answer))
        said = (
            events.Committed(**self._who(current), stall_s=stall_s)
            if current.asked is not None
            else events.Undone(**self._who(current), serving=str(serving), stall_s=stall_s)
        )
        outcome = events.Outcome.COMMITTED if current.asked is not None else events.Outcome.UNDONE
        return [*actions, Say(said), self._end(now_s, current, "done", outcome)]

    def _note_installed(self, current: Round, serving: Version | None) -> None:
        """What the ranks hold from now on, so that it can be verified later."""
        if current.asked is None:
            self._audits.undone()
            return
        whole = len(current.lanes) == self.world
        parts = [current.lanes[rank] for rank in range(self.world)] if whole else []
        base = self._audits.reference
        brought = None if current.fit is None else of_round(current.fit, current.asked.digests, parts, base)
        self._audits.committed(serving, brought)

    def _fail(self, now_s: float, current: Round, fault: Fault) -> list[Action]:
        """End the round at the old version, from any phase; ranks that exchanged are told to exchange back."""
        committing = current.phase == "committing"
        fault, torn = self._fallen_to(current, fault)
        current.fault = fault
        actions: list[Action] = self._settle(current, keep=False) + torn
        if committing:
            actions.append(Withdraw(current.id))
        if current.committer is not None:
            serving = states.serving_version(self.state)
            actions.append(Reply(*current.committer, m.Refusal(fault=fault, serving=serving)))
        actions += [
            Tell(rank, m.Drop(round=current.id))
            for rank in sorted(current.ranks & set(self.membership.members))
        ]
        aborted = events.Aborted(
            **self._who(current), rank=fault.rank, step=fault.step, code=fault.code, reason=fault.message
        )
        outcome = events.Outcome.TORN if isinstance(self.state, states.Torn) else events.Outcome.ABORTED
        return [*actions, Say(aborted), self._end(now_s, current, "failed", outcome)]

    def _fallen_to(self, current: Round, fault: Fault) -> tuple[Fault, list[Action]]:
        """Which state a failure leaves, what it is called then, and who is told of it."""
        if current.in_place and current.phase == "committing":
            if not current.touched:
                self.state = states.untouched(self.state)
            else:
                cause = f"{self.replica} holds a mixture since {current.label} failed: {fault.message}"
                fault = fault_of(Torn(cause), step=fault.step, rank=fault.rank, waited_s=fault.waited_s)
                self.state = states.after_failure(self.state, fault.message)
        else:
            self.state = states.after_failure(self.state, fault.message)
            if fault.code == Torn.code and current.asked is not None:
                self.state = states.Torn(current.asked.version, fault.message)
        if isinstance(self.state, states.Torn):
            return fault, self._audits.torn(fault.to_error())
        self._audits.stayed()
        return fault, []

    def _late(self, now_s: float, current: Round) -> list[Action]:
        missing, waited_s = current.missing(), now_s - current.began_s
        rank = missing[0] if len(missing) == 1 else None
        who = "rank " + ", ".join(map(str, missing)) if missing else "the publisher"
        step = {"open": "stage", "staged": "verify", "committing": "commit"}.get(current.phase, "decide")
        said: list[Action] = []
        if current.phase == "ready":
            said = [Say(events.LeaseExpired(**self._who(current), lease_s=current.lease_s))]
        error = DeadlineExceeded(f"{who} to {step}", waited_s)
        fault = fault_of(error, step=step, rank=rank, waited_s=waited_s)
        if current.in_place and current.phase == "committing":
            current.late, current.ends_s = True, NEVER
            return said + self._stop_overwriting(current, fault)
        return said + self._fail(now_s, current, fault)

    def _settle(self, current: Round, *, keep: bool) -> list[Action]:
        outcome = self._outcome(current, keep=keep)
        return [Reply(a.peer, a.call, outcome) for a in current.acks.values()]

    def _outcome(self, current: Round, *, keep: bool) -> m.Settled:
        torn = states.torn_by(self.state) if current.in_place else None
        serving = states.serving_version(self.state)
        return m.Settled(keep=keep, serving=serving, torn=None if torn is None else torn.cause)

    def _end(self, now_s: float, current: Round, phase: m.Phase, outcome: events.Outcome) -> Action:
        current.phase = phase
        self._round = None
        self._ended[current.id] = current
        last_kept = next((r.id for r in reversed(self._ended.values()) if r.phase == "done"), None)
        for old in list(self._ended)[:-REMEMBERED]:
            if old != last_kept:  # a rank in doubt about it may still ask
                del self._ended[old]
        serving = states.serving_version(self.state)
        return Say(
            events.RoundEnded(
                **self._who(current),
                outcome=outcome,
                took_s=now_s - current.began_s,
                verified=current.asked is not None and current.asked.verify,
                serving=None if serving is None else str(serving),
            )
        )

    # Finding and answering.

    def _current(self, round_id: RoundId, command: str) -> Round:
        if self._round is None or self._round.id != round_id:
            raise WrongState(f"not in that round ({states.describe(self.state)})", command)
        return self._round

    def _fallen(self) -> dict[RoundId, Fault]:
        """Rounds that ended because of a rank: their publisher may not have heard of it, and go on."""
        faults = ((ended.id, ended.fault) for ended in self._ended.values())
        return {round_id: fault for round_id, fault in faults if fault is not None and fault.rank is not None}

    def _named(self, round_id: RoundId) -> Round:
        ended = self._ended.get(round_id)
        return ended if ended is not None else self._current(round_id, "a question about a round")

    def _answered(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for known in (self._round, *self._ended.values()):
            if known is not None:
                actions += [Reply(w.peer, w.call, known.progress()) for w in known.heard(now_s)]
                readers = tuple(sorted(known.readers))
                actions += [Reply(w.peer, w.call, m.Aborted(readers=readers)) for w in known.released(now_s)]
        actions += self._audits.go_on(now_s)
        waiting, self._inquirers = self._inquirers, []
        for waiter in waiting:
            if self.membership.tally is not None:
                actions.append(Reply(waiter.peer, waiter.call, self._standing(self.membership.tally)))
            elif now_s >= waiter.ends_s:
                fault = fault_of(self.membership.incomplete(), step="inquire")
                actions.append(Reply(waiter.peer, waiter.call, m.Refusal(fault=fault)))
            else:
                self._inquirers.append(waiter)
        return actions

    def _who(self, current: Round) -> events.RoundFacts:
        return {"replica": self.replica, "round": f"{self.boot}/{current.id.epoch}", "version": current.label}
