"""The leader's record of one round: how far each rank has come, and which calls wait. Also the actions that a leader returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from liveweight.observe.events import AnyEvent
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.rounds.leader.membership import ManifestFit
from liveweight.spec.digest import Lanes
from liveweight.spec.layout import Layout
from liveweight.wire.messages import ORDER, Message, Open, Phase, Progress
from liveweight.wire.messages.values import Fault, KvPolicy, Overwritten, RankTimes, RoundId


@dataclass(frozen=True, slots=True)
class SendReply:
    """Answer this call of this peer."""

    peer: bytes
    call: int
    body: Message


@dataclass(frozen=True, slots=True)
class NotifyRank:
    """Notify this rank."""

    rank: int
    body: Message


@dataclass(frozen=True, slots=True)
class PutDecision:
    """Hand this decision to the boundary: swap shadow and live weights, for a commit or an undo."""

    round: RoundId
    undo: bool
    timeout_s: float
    kv_policy: KvPolicy | None = None


@dataclass(frozen=True, slots=True)
class WithdrawDecision:
    """Take the decision back if the boundary has not taken it."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """An event for the bus."""

    event: AnyEvent


NEVER = float("inf")

Action: TypeAlias = SendReply | NotifyRank | PutDecision | WithdrawDecision | EmitEvent


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A parked call: answered when the round has come that far, or at that time."""

    peer: bytes
    call: int
    until: Phase
    ends_s: float


@dataclass(frozen=True, slots=True)
class SwapAck:
    """A rank that has swapped its weights and waits for the outcome."""

    peer: bytes
    call: int
    seconds: float
    unread: int


@dataclass(slots=True)
class LeaderRound:
    """Mutable, owned by the leader. `request`, and `fit`, are None for an undo. `unchanged`: its version has the content that the replica
    serves already, under another label; ranks read nothing and swap nothing.

    In place, `gone` are ranks that were lost during the commit, `written` those that have begun to write; `taken`, whether
    the boundary may have taken the decision; `late`, whether its time is over.
    """

    id: RoundId
    label: str
    request: Open | None
    began_s: float
    ends_s: float
    ranks: frozenset[int]
    fit: ManifestFit | None = None
    phase: Phase = "open"
    fault: Fault | None = None
    lease_s: float = 0.0
    staged: dict[int, tuple[int, float]] = field(default_factory=dict)
    lanes: dict[int, Lanes] = field(default_factory=dict)
    verify_s: dict[int, float] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)
    acks: dict[int, SwapAck] = field(default_factory=dict)
    waiters: list[WaitingCall] = field(default_factory=list)
    aborters: list[WaitingCall] = field(default_factory=list)
    committer: tuple[bytes, int] | None = None
    in_place: bool = False
    unchanged: bool = False
    gone: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    taken: bool = True
    late: bool = False

    @property
    def touched(self) -> bool:
        """In place: whether live weights may have been written to. A rank that did not report may have."""
        return self.taken and bool(self.written or self.ranks - set(self.acks))

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.phase in ("done", "failed")

    def overwrote(self, rank: int, done: Overwritten | None, layout: Layout) -> None:
        """In place: note how far a rank came. A rank whose report says nothing about it counts as written."""
        self.readers.discard(rank)
        if done is None or done.begun:
            self.written.add(rank)
        if done is not None:
            self.staged[rank], self.verify_s[rank] = (done.size_bytes, done.stage_s), done.verify_s
            if done.lanes is not None:
                self.lanes[rank] = lanes_from_bytes(done.lanes, len(layout.placements))

    def missing(self) -> tuple[int, ...]:
        """The ranks that the next step waits for."""
        match self.phase:
            case "open":
                have: set[int] = set(self.staged)
            case "staged":
                have = set(self.lanes)
            case "committing":
                have = set(self.acks) | self.gone
            case _:
                have = set(self.ranks)
        return tuple(sorted(self.ranks - have))

    def progress(self) -> Progress:
        """The answer to WaitFor."""
        return Progress(
            phase=self.phase,
            missing=self.missing(),
            fault=self.fault,
            stage_s=max((seconds for _, seconds in self.staged.values()), default=0.0),
            verify_s=max(self.verify_s.values(), default=0.0),
            staged_bytes=sum(size for size, _ in self.staged.values()),
            readers=tuple(sorted(self.readers)),
        )

    def times(self) -> tuple[RankTimes, ...]:
        """The times and bytes of each rank so far."""
        found = []
        for rank in sorted(self.ranks):
            size_bytes, stage_s = self.staged.get(rank, (0, 0.0))
            ack = self.acks.get(rank)
            found.append(
                RankTimes(
                    rank=rank,
                    staged_bytes=size_bytes,
                    stage_s=stage_s,
                    verify_s=self.verify_s.get(rank, 0.0),
                    swap_s=0.0 if ack is None else ack.seconds,
                    unread=0 if ack is None else ack.unread,
                )
            )
        return tuple(found)

    def take_answerable(self, now_s: float) -> list[WaitingCall]:
        """Take out the WaitFor calls that can be answered now."""
        ready = [
            waiter
            for waiter in self.waiters
            if self.over or ORDER[self.phase] >= ORDER[waiter.until] or now_s >= waiter.ends_s
        ]
        self.waiters = [waiter for waiter in self.waiters if waiter not in ready]
        return ready

    def take_answerable_aborts(self, now_s: float) -> list[WaitingCall]:
        """Take out the Abort calls that can be answered now."""
        ready = [waiter for waiter in self.aborters if not self.readers or now_s >= waiter.ends_s]
        self.aborters = [waiter for waiter in self.aborters if waiter not in ready]
        return ready

    def next_s(self) -> float:
        """When time alone will change something."""
        ends = [waiter.ends_s for waiter in (*self.waiters, *self.aborters)]
        return min([*ends, *([] if self.over else [self.ends_s])], default=NEVER)
