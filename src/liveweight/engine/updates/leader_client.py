"""The engine's client of its own leader: the state of live updates, and undo.

Connects as any publisher does, so it sees what a publisher sees. The list of past rounds comes from events on the bus.
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
    """A round that ended. `stall_s` is how long decoding stopped, if it did; `reason`, why it failed.

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
    """The state of a replica. `serving` None: a swap is under way; `round` is the id of the open round.

    `serving_s` is how long it has served that version. `snapshots` is None if it keeps none, `recovery` if it never lost a
    rank; `pending` says why it takes no requests before a publisher has connected, or is None.
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
        self._query_lock, self._command_lock = threading.Lock(), threading.Lock()
        self._queries, self._commands = WireReplica(address, secret), WireReplica(address, secret)
        self._rounds: deque[RoundSummary] = deque(maxlen=REMEMBERED)
        self._facts: dict[str, tuple[float | None, str | None]] = {}
        self._kept: tuple[str, ...] = ()
        self._subscription = bus.subscribe(self._on_event)

    def update_status(self) -> UpdateStatus:
        """The present state, as the leader reports it."""
        with self._query_lock:
            try:
                reply = self._queries.replica_state(Deadline.after(ANSWER_S))
            except ReplicaRefused as refused:
                raise refused.to_error() from refused
        open_round = None if reply.round is None else f"{reply.round.boot}/{reply.round.epoch}"
        return UpdateStatus(
            state=reply.state,
            serving=reply.serving,
            undo=reply.undo,
            round=open_round,
            rounds=tuple(self._rounds),
            kept=reply.kept,
            serving_s=reply.serving_s,
        )

    def undo(self, timeout_s: float) -> Version | None:
        """Go back to the version before; returns the version that serves then. WrongState without one, RoundOpen while a round is open."""
        with self._command_lock:  # not the query lock: queries are answered while undo waits
            try:
                return self._commands.undo(OPERATOR, Deadline.after(timeout_s)).serving
            except ReplicaRefused as refused:
                raise refused.to_error() from refused

    def note_sleep(self, *, asleep: bool, weights: bool, kv_cache: bool, timeout_s: float) -> None:
        """Tell the leader that memory will be released, or that it was restored. RoundOpen or WrongState if the leader refuses."""
        body = m.Sleep if asleep else m.Wake
        with self._command_lock:
            try:
                self._commands.note_sleep(body(weights=weights, kv_cache=kv_cache), Deadline.after(timeout_s))
            except ReplicaRefused as refused:
                raise refused.to_error() from refused

    def close(self) -> None:
        """Disconnect from the leader and the bus."""
        self._subscription.close()
        for lock, replica in ((self._query_lock, self._queries), (self._command_lock, self._commands)):
            replica.interrupt()  # ends the call that holds the lock
            with lock:
                replica.close()

    def _on_event(self, event: ev.AnyEvent) -> None:
        """Called by the bus on the leader's thread: one round ends before the next begins."""
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
