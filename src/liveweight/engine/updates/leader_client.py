"""The leader client: what an engine can say of its live updates, and the one thing that an operator may decide there, which is to go back.

It speaks to the engine's own leader as any publisher does, so it sees what a publisher sees. What it remembers of rounds it hears on
the bus.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from liveweight.engine.status import RecoveryStatus, SavingStatus
from liveweight.observe import events as ev
from liveweight.observe.bus import Bus
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.credentials import Secret

OPERATOR = "operator"
REMEMBERED = 16
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummary:
    """A round that ended. `stall_s` is how long decoding stood still, where it did; `reason`, why it failed.

    `kept` names the optional groups of tensors, such as the draft's, that its offer left out.
    """

    version: str
    outcome: str
    took_s: float
    stall_s: float | None = None
    reason: str | None = None
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatus:
    """A replica's standing. `serving` None: a swap is under way; `round` is the id of the one that is open.

    `serving_s` is for how long it has served that. `snapshots` and `recovery` are None where it keeps none, and where it never lost a
    rank; `pending` says why it takes no requests before a publisher has come, or is None.
    """

    state: str
    serving: Version | None
    undo: Version | None
    round: str | None
    rounds: tuple[RoundSummary, ...]
    kept: tuple[str, ...] = ()
    snapshots: SavingStatus | None = None
    recovery: RecoveryStatus | None = None
    serving_s: float = 0.0
    pending: str | None = None


class LeaderClient:
    """For any thread. Ends with `close`."""

    def __init__(self, address: str, secret: Secret, bus: Bus) -> None:
        self.address = address
        self._asking, self._deciding = threading.Lock(), threading.Lock()
        self._leader, self._decider = WireReplica(address, secret), WireReplica(address, secret)
        self._rounds: deque[RoundSummary] = deque(maxlen=REMEMBERED)
        self._facts: dict[str, tuple[float | None, str | None]] = {}
        self._kept: tuple[str, ...] = ()
        self._subscription = bus.subscribe(self._hear)

    def update_status(self) -> UpdateStatus:
        """How it is now, as the leader says."""
        with self._asking:
            try:
                said = self._leader.replica_state(Deadline.after(ANSWER_S))
            except ReplicaRefused as refused:
                raise refused.to_error() from refused
        open_round = None if said.round is None else f"{said.round.boot}/{said.round.epoch}"
        return UpdateStatus(
            state=said.state,
            serving=said.serving,
            undo=said.undo,
            round=open_round,
            rounds=tuple(self._rounds),
            kept=said.kept,
            serving_s=said.serving_s,
        )

    def undo(self, timeout_s: float) -> Version | None:
        """Go back to the version before; what serves then. WrongState without one, RoundOpen while a round is open."""
        with self._deciding:  # apart from questions: those are answered while it waits
            try:
                return self._decider.undo(OPERATOR, Deadline.after(timeout_s)).serving
            except ReplicaRefused as refused:
                raise refused.to_error() from refused

    def rest(self, *, asleep: bool, weights: bool, kv_cache: bool, timeout_s: float) -> None:
        """Tell the leader that memory is given back, before it is, or that it is back. RoundOpen or WrongState where it cannot be."""
        body = m.Sleep if asleep else m.Wake
        with self._deciding:
            try:
                self._decider.rest(body(weights=weights, kv_cache=kv_cache), Deadline.after(timeout_s))
            except ReplicaRefused as refused:
                raise refused.to_error() from refused

    def close(self) -> None:
        """Let go of the leader and the bus."""
        self._subscription.close()
        for lock, replica in ((self._asking, self._leader), (self._deciding, self._decider)):
            replica.interrupt()  # ends the call that holds the lock
            with lock:
                replica.close()

    def _hear(self, event: ev.AnyEvent) -> None:
        """The bus's reader, on the leader's thread: one round ends before the next begins."""
        match event:
            case ev.RoundOpened(kept=kept):
                self._kept = kept
            case (
                ev.RoundCommitted(rank=None, round=name, stall_s=stall_s)
                | ev.RoundUndone(round=name, stall_s=stall_s)
            ):
                self._facts[name] = (stall_s, None)
            case ev.RoundGivenUp(round=name, reason=reason):
                self._facts[name] = (None, reason)
            case ev.RoundEnded(round=name, version=version, outcome=outcome, took_s=took_s):
                stall_s_, reason_ = self._facts.pop(name, (None, None))
                self._rounds.append(
                    RoundSummary(
                        version=version,
                        outcome=outcome,
                        took_s=took_s,
                        stall_s=stall_s_,
                        reason=reason_,
                        kept=self._kept,
                    )
                )
                self._kept = ()
            case _:
                pass
