"""The rank server: rank 0's record of the other ranks of its trainer. The ranks report to it and get the outcomes of rounds from it.

Owns a listener and its thread. Errors name the ranks that have not reported by the deadline. A rank that is gone is noticed at once,
because a probe to it cannot be delivered. It uses no collective: ranks may report in any order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    MessageInvalid,
    RoundAborted,
    WrongState,
)
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import (
    AnnounceShards,
    GetOutcome,
    Message,
    Outcome,
    OutcomePending,
    Probe,
    Refusal,
    RegisterRank,
    ShardsFrozen,
)
from liveweight.wire.messages.body import refuse_call
from liveweight.wire.messages.values import Fault, fault_of

IDLE_S = 3600.0
PROBE_S = 0.2
"""How often ranks are probed while a caller waits for them."""
SILENT_S = 3.0  # a rank that waits for the end of a round asks for it every second
OUTCOMES_KEPT = 16
DISMISS_S = 5.0
LAST_ANSWERS_S = 0.1
"""How long closing waits for the last answers to be sent."""

Body = TypeVar("Body", RegisterRank, AnnounceShards, ShardsFrozen)


class RankRefused(Exception):
    """A rank of the trainer cannot go on, is gone or late; the fault names it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCall:
    """A call of a rank that is not answered yet. A GetOutcome is answered by `ends_s` at the latest."""

    peer: bytes
    call: int
    body: Message
    ends_s: float = float("inf")


class RankServer:
    """The other ranks of a trainer, at its rank 0. Methods are for any thread; ranks are answered on a thread of its own."""

    def __init__(self, address: str, secret: Secret, *, world: int, bus: Bus | None = None) -> None:
        self._others = frozenset(range(1, world))
        self._world = world
        self._changed = threading.Condition()
        self._peers: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._calls: dict[type[Message], dict[int, _PendingCall]] = {RegisterRank: {}, AnnounceShards: {}}
        self._frozen: dict[int, ShardsFrozen] = {}
        self._number = 0
        self._outcomes: dict[int, Outcome] = {}
        self._begun_s, self._last_asked_s = 0.0, dict[int, float]()
        self._pending_calls: list[_PendingCall] = []
        self._outbox: list[tuple[bytes, Message, int]] = []
        self._watchers, self._probed_s = 0, 0.0
        self._interrupted = self._closing = False
        listener = Listener(address, secret, Codec[Message](Message), refuse=refuse_call, bus=bus)
        self.address, self._waker = listener.address, listener.waker()
        self._thread = threading.Thread(  # from here on the listener is the thread's
            target=self._serve, args=(listener,), name="liveweight-rank-server", daemon=True
        )
        self._thread.start()

    def wait_for_registrations(self, deadline: Deadline) -> list[RegisterRank]:
        """The other ranks' registrations, in rank order, once all have come."""
        self._wait(deadline, "enlist", "register", lambda: self._bodies(RegisterRank))
        return [
            pending.body
            for _, pending in sorted(self._calls[RegisterRank].items())
            if isinstance(pending.body, RegisterRank)
        ]

    def wait_for_shards(self, deadline: Deadline) -> list[AnnounceShards]:
        """The shards that the other ranks announced, in rank order, once all have come."""
        self._wait(deadline, "station", "announce its shards", lambda: self._bodies(AnnounceShards))
        return [
            pending.body
            for _, pending in sorted(self._calls[AnnounceShards].items())
            if isinstance(pending.body, AnnounceShards)
        ]

    def answer(self, body: Message) -> None:
        """Answer every pending registration or announcement with this message."""
        with self._changed:
            for calls in self._calls.values():
                self._outbox += [(pending.peer, body, pending.call) for pending in calls.values()]
                calls.clear()
        self._waker.wake()

    def dismiss(self, body: Message) -> None:
        """Answer every rank with this message, now and for DISMISS_S: ranks that call a little late must get the reason, too."""
        deadline = Deadline.after(DISMISS_S)
        with self.watching(), self._changed:
            while self._others - self._lost and not deadline.over:
                self.answer(body)
                self._changed.wait(deadline.remaining_s())

    def begin(self, number: int) -> None:
        """That round has begun here."""
        with self._changed:
            self._number, self._begun_s = number, time.monotonic()
            self._last_asked_s.clear()
            self._frozen = {rank: body for rank, body in self._frozen.items() if body.number >= number}

    def wait_for_frozen(self, label: str | int, deadline: Deadline) -> Mapping[int, ShardsFrozen]:
        """The other ranks' reports of the round that was begun last, once all have come."""
        self._wait(deadline, "freeze", f"freeze its shards of {label}", self._reports)
        with self._changed:
            reports = self._reports()
        for rank, report in reports.items():
            if str(report.label) != str(label):
                state = f"trainer rank {rank} offers {report.label!r} and rank 0 offers {label!r}"
                raise RankRefused(fault_of(WrongState(state, "a round"), step="freeze", rank=rank))
        return reports

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Probe the ranks meanwhile, so that `poll` notices a lost one."""
        with self._changed:
            self._watchers += 1
        self._waker.wake()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def poll(self) -> None:
        """Raise ChannelClosed where a rank is gone, as far as is known by now."""
        with self._changed:
            lost = sorted(self._lost)
        if lost:
            raise ChannelClosed(f"trainer rank {', '.join(map(str, lost))} is gone")

    def silent(self) -> dict[int, float]:
        """Ranks that do not ask for this round's outcome although others do, with the seconds since they last asked."""
        now_s = time.monotonic()
        with self._changed:
            last_asked_s = self._last_asked_s or dict.fromkeys(
                self._others, now_s
            )  # no rank asks: all may be training meanwhile
            since = {rank: now_s - last_asked_s.get(rank, self._begun_s) for rank in sorted(self._others)}
        return {rank: silent_s for rank, silent_s in since.items() if silent_s > SILENT_S}

    def conclude(self, outcome: Outcome) -> None:
        """Record the outcome of a round, and send it to the ranks that ask for it."""
        with self._changed:
            self._outcomes[outcome.number] = outcome
            self._outcomes.pop(outcome.number - OUTCOMES_KEPT, None)
        self._waker.wake()

    def interrupt(self) -> None:
        """End every wait of this side."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and remove the socket; the ranks notice that rank 0 is gone. May be called twice."""
        self.interrupt()
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _wait(
        self, deadline: Deadline, step: str, what: str, found: Callable[[], Mapping[int, object]]
    ) -> None:
        """Wait until `found` has every other rank. Raises RankRefused for the first rank that reports a fault, is gone, or is late."""
        with self.watching(), self._changed:
            while True:
                there = found()
                for body in there.values():
                    fault: Fault | None = getattr(body, "fault", None)
                    if fault is not None:
                        raise RankRefused(fault)
                for rank in sorted(self._lost):
                    raise RankRefused(
                        fault_of(ChannelClosed(f"trainer rank {rank} is gone"), step=step, rank=rank)
                    )
                missing = sorted(self._others - set(there))
                if not missing:
                    return
                if self._interrupted:
                    raise RankRefused(fault_of(RoundAborted("the publisher was closed"), step=step))
                if deadline.over:
                    late = deadline.exceeded(f"trainer rank {', '.join(map(str, missing))} to {what}")
                    raise RankRefused(fault_of(late, step=step, rank=missing[0], waited_s=late.waited_s))
                self._changed.wait(deadline.remaining_s())

    def _bodies(self, kind: type[Message]) -> Mapping[int, object]:
        return {rank: pending.body for rank, pending in self._calls[kind].items()}

    def _reports(self) -> dict[int, ShardsFrozen]:
        return {rank: body for rank, body in self._frozen.items() if body.number == self._number}

    # The thread.

    def _serve(self, listener: Listener[Message]) -> None:
        with listener:
            while not self._closing:
                incoming = self._next(listener)
                if incoming is not None:
                    self._handle(listener, incoming)
                self._answer_pending(listener)
                self._probe(listener)
            if self._answer_pending(listener):
                with suppress(DeadlineExceeded):
                    listener.receive(Deadline.after(LAST_ANSWERS_S), "the last answers to leave")

    def _next(self, listener: Listener[Message]) -> Incoming[Message] | None:
        ends_s = [pending.ends_s - time.monotonic() for pending in self._pending_calls]
        with self._changed:
            wait_s = min([*ends_s, PROBE_S if self._watchers else IDLE_S])
        try:
            return listener.receive_or_wake(Deadline.after(max(0.0, wait_s)), "a rank of the trainer")
        except DeadlineExceeded:
            return None

    def _handle(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        peer, call, body = incoming.peer, incoming.call, incoming.body
        with self._changed:
            match body:
                case RegisterRank(rank=rank) if (
                    body.world == self._world and self._peers.setdefault(rank, peer) == peer
                ):
                    self._calls[RegisterRank][rank] = _PendingCall(peer=peer, call=call, body=body)
                case AnnounceShards(rank=rank) if self._peers.get(rank) == peer:
                    self._calls[AnnounceShards][rank] = _PendingCall(peer=peer, call=call, body=body)
                case ShardsFrozen(rank=rank, number=number) if self._peers.get(rank) == peer:
                    if number >= self._number:
                        self._frozen[rank] = body
                case GetOutcome(rank=rank, wait_s=wait_s) if self._peers.get(rank) == peer:
                    self._last_asked_s[rank] = time.monotonic()
                    self._pending_calls.append(
                        _PendingCall(peer=peer, call=call, body=body, ends_s=time.monotonic() + wait_s)
                    )
                case other:
                    error = MessageInvalid(f"no rank of this trainer may send {type(other).__name__} now")
                    _send(listener, peer, Refusal(fault=fault_of(error, step="enlist")), call)
            self._changed.notify_all()

    def _answer_pending(self, listener: Listener[Message]) -> bool:
        """Answer the pending calls that can be answered now. Returns whether there were any."""
        now_s = time.monotonic()
        with self._changed:
            sending, self._outbox = self._outbox, []
            waiting, self._pending_calls = self._pending_calls, []
            for pending in waiting:
                number = pending.body.number if isinstance(pending.body, GetOutcome) else 0
                outcome = self._outcomes.get(number)
                if outcome is not None:
                    sending.append((pending.peer, outcome, pending.call))
                elif now_s >= pending.ends_s:
                    sending.append((pending.peer, OutcomePending(begun=number <= self._number), pending.call))
                else:
                    self._pending_calls.append(pending)
        for peer, body, call in sending:
            _send(listener, peer, body, call)
        return bool(sending)

    def _probe(self, listener: Listener[Message]) -> None:
        now_s = time.monotonic()
        if now_s < self._probed_s + PROBE_S:
            return
        self._probed_s = now_s
        with self._changed:
            watched = [item for item in self._peers.items() if self._watchers and item[0] not in self._lost]
        gone = {rank for rank, peer in watched if not _send(listener, peer, Probe(), 0)}
        if gone:
            with self._changed:
                self._lost |= gone
                self._changed.notify_all()


def _send(listener: Listener[Message], peer: bytes, body: Message, call: int) -> bool:
    """Send without waiting; returns whether the peer is there. A peer that does not read its messages loses this one."""
    try:
        listener.send(peer, body, call, Deadline.after(0.0))
    except ChannelClosed:
        return False
    except LiveWeightError:
        return True
    return True
