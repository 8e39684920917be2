"""Audits: the live weights of all ranks, digested and compared with what they should be. Pure: messages and time go in, actions come out.

An audit asks every rank for digests of its live weights, while rounds go on. Live weights change only at a swap, so the digests count
if no swap was decided since the audit asked for them; otherwise the audit asks again, once. An audit decides nothing about
rounds, and no round waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from liveweight.errors import (
    NAMES_SHOWN,
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    Refused,
    WeightsExchanged,
    WireError,
)
from liveweight.observe.events import Audited
from liveweight.plan.digest_sums import DigestSums, lanes_from_bytes
from liveweight.rounds.leader.audit_references import AuditReference, Mask, of_manifest
from liveweight.rounds.leader.audit_verdicts import InstalledVersion, choose, verdict
from liveweight.rounds.leader.membership import JoinedRank, Membership
from liveweight.rounds.leader.round_record import Action, EmitEvent, NotifyRank, SendReply
from liveweight.spec.digest import Lanes
from liveweight.spec.manifest import Version
from liveweight.spec.version_age import START_RUN
from liveweight.wire import messages as m
from liveweight.wire.messages.values import Fault, fault_of

TRIES = 2
NEVER = float("inf")


@dataclass(slots=True, kw_only=True)
class Audit:
    """One Verify call under way, or another call that is answered with what `then` makes of the verdict. `number` is that of its present
    try, None while it waits for a swap to end."""

    peer: bytes
    call: int
    request: m.Verify
    digest_sums: DigestSums
    chosen: Mask
    reference: AuditReference | None
    began_s: float
    number: int | None = None
    tries: int = 0
    swaps: int = 0
    lanes: dict[int, Lanes] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    apart: dict[str, list[int]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    fault: Fault | None = None
    changed: bool = False
    then: Callable[[m.Verdict], m.Message] | None = None

    @property
    def ends_s(self) -> float:
        """When its caller waits no more."""
        return self.began_s + self.request.timeout_s

    def missing(self, world: int) -> list[int]:
        """The ranks that have not answered this try."""
        return [rank for rank in range(world) if rank not in self.seconds]


class Audits:
    """All audits of a replica, and what is known of the content that it serves and served before. Used by the leader's thread."""

    def __init__(self, replica: str, membership: Membership) -> None:
        self._replica, self._membership = replica, membership
        self._numbers = itertools.count(1)
        self._open: list[Audit] = []
        self._joins: dict[int, m.Join] = {}
        self._swaps, self._swapping = 0, False
        self._now, self._before = InstalledVersion(), InstalledVersion()
        self._start: InstalledVersion | None = None

    # Changes of the replica.

    def on_joined(self, body: m.Join, version: Version | None) -> None:
        """A rank has joined; `version` is what the replica serves, once it is complete."""
        self._joins[body.rank] = body
        digest_sums = self._membership.digest_sums
        if digest_sums is not None:
            try:
                reference = self._reference_of_joins(digest_sums, version)
            except (Refused, WireError):  # it does not fit what the ranks own: no comparison is possible
                reference = None
            self._now, self._before = InstalledVersion(version, reference), InstalledVersion()
            if self._start is None or (version is not None and version.run == START_RUN):
                self._start = self._now
            else:  # ranks that were replaced hold something else than the others: nobody knows what is still as it was
                self._now = replace(
                    self._now, changed=np.ones(len(digest_sums.expected.tensors), dtype=np.bool_)
                )

    def on_swap_decided(self) -> None:
        """A swap was decided: what was digested since may be of either side."""
        self._swaps += 1
        self._swapping = True

    def on_committed(
        self, version: Version | None, reference: AuditReference | None, filled: Mask | None
    ) -> None:
        """All ranks hold that version now, whose round has filled these tensors anew."""
        before = self._now.changed
        changed = before if filled is None else filled if before is None else before | filled
        self._now, self._before = InstalledVersion(version, reference, changed), self._now
        self._joins.clear()
        self._swapping = False

    def on_renamed(self, version: Version | None) -> None:
        """All ranks hold what they held, which is that version's content, too."""
        self._now, self._before = replace(self._now, version=version), self._now
        self._swapping = False

    def on_undone(self) -> None:
        """All ranks hold the version before."""
        self._now, self._before = self._before, self._now
        self._swapping = False

    def on_swap_failed(self) -> None:
        """A swap failed: all ranks have, or will have before they serve, what they had."""
        self._swapping = False

    def on_torn(self, error: LiveWeightError) -> list[Action]:
        """Ranks hold a mixture, which is no version and cannot be compared: refuse the waiting calls."""
        self._swapping = False
        self._now, self._before = InstalledVersion(), InstalledVersion()
        return self.end(error)

    def end(self, error: LiveWeightError) -> list[Action]:
        """Refuse the waiting calls: there is nothing to digest."""
        ended, self._open = self._open, []
        return [SendReply(audit.peer, audit.call, self._refusal(error)) for audit in ended]

    @property
    def damaged(self) -> bool:
        """Whether an audit has found that ranks do not hold what was installed: then the same version must be installed again."""
        return self._now.damaged

    def changed_since_start(self, names: Sequence[str]) -> list[str]:
        """Which of these tensors may have other content than when the ranks joined first."""
        if self._now.changed is None or not names:
            return []
        changed = self._now.changed.copy()
        now, start = self._now.reference, None if self._start is None else self._start.reference
        if now is not None and start is not None:
            changed &= ~(now.known & start.known & (now.lanes == start.lanes).all(axis=1))
        asked = choose(self._membership.whole(), names, None)
        tensors = self._membership.whole().expected.tensors
        return [tensors[number].name for number in np.flatnonzero(asked & changed)]

    @property
    def reference(self) -> AuditReference | None:
        """The digests that the installed version should have, as far as they are known."""
        return self._now.reference

    # Calls of publishers, answers of ranks.

    @property
    def waiting(self) -> bool:
        """Whether ranks are being waited for."""
        return bool(self._open)

    def next_s(self) -> float:
        """When time alone will change something."""
        return min((audit.ends_s for audit in self._open), default=NEVER)

    def begin(
        self,
        now_s: float,
        peer: bytes,
        call: int,
        request: m.Verify,
        then: Callable[[m.Verdict], m.Message] | None = None,
    ) -> list[Action]:
        """Take a call. Refused: names that the replica does not have, a manifest that does not fit. `then` makes the answer to the call of
        the verdict; left out, the verdict is the answer."""
        digest_sums = self._membership.whole()
        reference = None if request.manifest is None else of_manifest(digest_sums, request.manifest)
        chosen = choose(digest_sums, request.names, reference)
        audit = Audit(
            peer=peer,
            call=call,
            request=request,
            digest_sums=digest_sums,
            chosen=chosen,
            reference=reference,
            began_s=now_s,
            then=then,
        )
        self._open.append(audit)
        return self.advance(now_s)

    def on_digests(self, now_s: float, peer: bytes, body: m.LiveDigests) -> list[Action]:
        """A rank's answer. Of another try, or of a process that was replaced, it has no effect."""
        audit = next((audit for audit in self._open if audit.number == body.audit), None)
        member = self._membership.members.get(body.rank)
        if audit is None or member is None or member.peer != peer:
            return []
        audit.seconds[body.rank] = body.seconds
        if body.fault is not None:
            audit.fault = audit.fault or body.fault
        elif body.lanes is None:
            audit.changed = True
        else:
            audit.lanes[body.rank] = lanes_from_bytes(body.lanes, len(member.layout.placements))
            audit.unread.update(body.unread)
            for name in body.differing:
                audit.apart.setdefault(name, []).append(body.rank)
        return self.advance(now_s)

    def on_rank_lost(self, rank: int, member: JoinedRank) -> list[Action]:
        """A rank's process is gone: refuse the waiting calls."""
        error = ChannelClosed(f"rank {rank} (process {member.pid}) is gone")
        fault = fault_of(error, step="verify", rank=rank)
        self._joins.pop(rank, None)
        ended, self._open = self._open, []
        return [
            SendReply(audit.peer, audit.call, m.Refusal(fault=fault, serving=self._now.version))
            for audit in ended
        ]

    def advance(self, now_s: float) -> list[Action]:
        """For every audit, do what is due: ask the ranks, ask again, answer or give up."""
        actions: list[Action] = []
        for audit in list(self._open):
            answer = self._answer(now_s, audit)
            if answer is not None:
                self._open.remove(audit)
                reply: m.Message = answer
                if audit.then is not None and isinstance(answer, m.Verdict):
                    reply = audit.then(answer)
                actions.append(SendReply(audit.peer, audit.call, reply))
            if isinstance(answer, m.Verdict):
                actions.append(EmitEvent(self._event(answer)))
            elif audit.number is None and not self._swapping:
                actions += self._ask_ranks(now_s, audit)
        return actions

    def _ask_ranks(self, now_s: float, audit: Audit) -> list[Action]:
        """A new try: late answers to the one before have another number."""
        audit.number, audit.tries, audit.swaps = next(self._numbers), audit.tries + 1, self._swaps
        audit.lanes, audit.seconds, audit.changed = {}, {}, False
        audit.apart, audit.unread = {}, set()
        expected, names = audit.digest_sums.expected.tensors, None
        if not audit.chosen.all():
            names = tuple(expected[number].name for number in np.flatnonzero(audit.chosen))
        order = m.DigestLive(audit=audit.number, names=names, timeout_s=max(0.0, audit.ends_s - now_s))
        return [NotifyRank(rank, order) for rank in range(self._membership.world)]

    def _answer(self, now_s: float, audit: Audit) -> m.Verdict | m.Refusal | None:
        """The answer to the caller, if it is due. A try during which weights were swapped is dropped."""
        missing = audit.missing(self._membership.world)
        if audit.number is not None and (audit.changed or audit.fault is not None or not missing):
            if audit.changed or audit.swaps != self._swaps:
                if audit.tries >= TRIES:
                    return self._refusal(WeightsExchanged("weights were swapped while they were digested"))
                audit.number, audit.fault = None, None
            elif audit.fault is not None:
                return m.Refusal(fault=audit.fault, serving=self._now.version)
            else:
                return self._verdict(audit)
        if now_s < audit.ends_s:
            return None
        who = "rank " + ", ".join(map(str, missing)) + " to digest its weights"
        waited_s = now_s - audit.began_s
        error = DeadlineExceeded("a swap of weights to end" if audit.number is None else who, waited_s)
        return self._refusal(error, rank=missing[0] if len(missing) == 1 else None, waited_s=waited_s)

    def _event(self, found: m.Verdict) -> Audited:
        return Audited(
            replica=self._replica,
            serving=None if found.serving is None else str(found.serving),
            match=found.match,
            differing=tuple(one.name for one in found.mismatches[:NAMES_SHOWN]),
            count=found.differing,
            took_s=max(found.seconds),
        )

    def _refusal(self, error: LiveWeightError, rank: int | None = None, waited_s: float = 0.0) -> m.Refusal:
        fault = fault_of(error, step="verify", rank=rank, waited_s=waited_s)
        return m.Refusal(fault=fault, serving=self._now.version)

    def _reference_of_joins(self, digest_sums: DigestSums, version: Version | None) -> AuditReference | None:
        """The reference from the ranks' Join messages; None unless their manifest is that of `version`."""
        manifests = [body.manifest for body in self._joins.values() if body.manifest is not None]
        if version is None or not manifests or manifests[0].digest() != version.digest:
            return None
        joins = [self._joins.get(rank) for rank in range(self._membership.world)]
        parts = [
            lanes_from_bytes(body.lanes, len(body.layout.placements))
            for body in joins
            if body is not None and body.lanes is not None
        ]
        return of_manifest(digest_sums, manifests[0], tuple(parts) if len(parts) == len(joins) else None)

    def _verdict(self, audit: Audit) -> m.Verdict:
        ranks = range(self._membership.world)
        found = verdict(
            audit.digest_sums,
            [audit.lanes[rank] for rank in ranks],
            seconds=[audit.seconds[rank] for rank in ranks],
            chosen=audit.chosen,
            given=audit.reference,
            installed=(self._now, self._before),
            listed=audit.request.listed,
            apart=audit.apart,
            unread=audit.unread,
        )
        if found.match is False and self._now.expects(audit.reference):
            self._now = replace(self._now, damaged=True)
        return found
