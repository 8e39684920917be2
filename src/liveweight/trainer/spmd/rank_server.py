"""The rank server: rank 0's record of the other ranks of its trainer, and the one place where they report and learn how a round ended.

Owns a listener and its thread. Who has not reported by the deadline is named; who is gone is noticed at once, by a message that cannot be
delivered any more. No collective: ranks come when they come.
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
from liveweight.wire.messages.values import Fault, fault_of

IDLE_S = 3600.0
PROBE_S = 0.2
"""How often ranks are looked after while somebody waits for them."""
SILENT_S = 3.0  # a rank that waits for the end of a round asks for it every second
OUTCOMES_KEPT = 16
DISMISS_S = 5.0
FAREWELL_S = 0.1
"""How long closing lets the last answers leave."""

Body = TypeVar("Body", RegisterRank, AnnounceShards, ShardsFrozen)


class RankRefused(Exception):
    """A rank of the trainer cannot go on, is gone or late; the fault names it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call of a rank that is not answered yet; of a question how a round ended, at the latest then."""

    peer: bytes
    call: int
    body: Message
    ends_s: float = float("inf")


class RankServer:
    """The other ranks of a trainer, at its rank 0. Methods are for any thread; ranks are answered on a thread of its own."""

    def __init__(self, address: str, secret: Secret, *, world: int) -> None:
        self._others = frozenset(range(1, world))
        self._world = world
        self._changed = threading.Condition()
        self._peers: dict[int, bytes] = {}
        self._lost: set[int] = set()
        self._calls: dict[type[Message], dict[int, _Asked]] = {RegisterRank: {}, AnnounceShards: {}}
        self._frozen: dict[int, ShardsFrozen] = {}
        self._number = 0
        self._outcomes: dict[int, Outcome] = {}
        self._begun_s, self._heard_s = 0.0, dict[int, float]()
        self._asked: list[_Asked] = []
        self._outbox: list[tuple[bytes, Message, int]] = []
        self._watchers, self._probed_s = 0, 0.0
        self._interrupted = self._closing = False
        listener = Listener(address, secret, Codec[Message](Message))
        self.address, self._waker = listener.address, listener.waker()
        self._thread = threading.Thread(  # from here on the listener is the thread's
            target=self._serve, args=(listener,), name="liveweight-roster", daemon=True
        )
        self._thread.start()

    def enlisted(self, deadline: Deadline) -> list[RegisterRank]:
        """The other ranks' reports for service, in their order, once all have come."""
        self._wait(deadline, "enlist", "enlist", lambda: self._bodies(RegisterRank))
        return [
            asked.body
            for _, asked in sorted(self._calls[RegisterRank].items())
            if isinstance(asked.body, RegisterRank)
        ]

    def stationed(self, deadline: Deadline) -> list[AnnounceShards]:
        """What the other ranks will freeze, and where, in their order, once all have said it."""
        self._wait(deadline, "station", "say what it holds", lambda: self._bodies(AnnounceShards))
        return [
            asked.body
            for _, asked in sorted(self._calls[AnnounceShards].items())
            if isinstance(asked.body, AnnounceShards)
        ]

    def answer(self, body: Message) -> None:
        """Answer all that wait for one answer."""
        with self._changed:
            for calls in self._calls.values():
                self._outbox += [(asked.peer, body, asked.call) for asked in calls.values()]
                calls.clear()
        self._waker.wake()

    def dismiss(self, body: Message) -> None:
        """Answer every rank with that, now and for a while: they are to hear why it ends here, also those that come a little late."""
        deadline = Deadline.after(DISMISS_S)
        with self.watching(), self._changed:
            while self._others - self._lost and not deadline.over:
                self.answer(body)
                self._changed.wait(deadline.remaining_s())

    def begin(self, number: int) -> None:
        """That round has begun here."""
        with self._changed:
            self._number, self._begun_s = number, time.monotonic()
            self._heard_s.clear()
            self._frozen = {rank: body for rank, body in self._frozen.items() if body.number >= number}

    def frozen(self, label: str | int, deadline: Deadline) -> Mapping[int, ShardsFrozen]:
        """The other ranks' reports of the round that was begun last, once all have come."""
        self._wait(deadline, "freeze", f"freeze its shards of {label}", self._reports)
        with self._changed:
            reports = self._reports()
        for rank, report in reports.items():
            if report.label != label:
                state = f"trainer rank {rank} offers {report.label!r} and rank 0 offers {label!r}"
                raise RankRefused(fault_of(WrongState(state, "a round"), step="freeze", rank=rank))
        return reports

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after the ranks meanwhile, for `poll` to tell."""
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
        """Ranks that do not ask how this round ends, where others do, and since how many seconds: they stand still."""
        now_s = time.monotonic()
        with self._changed:
            heard_s = self._heard_s or dict.fromkeys(
                self._others, now_s
            )  # nobody asks: all may be training meanwhile
            since = {rank: now_s - heard_s.get(rank, self._begun_s) for rank in sorted(self._others)}
        return {rank: silent_s for rank, silent_s in since.items() if silent_s > SILENT_S}

    def conclude(self, outcome: Outcome) -> None:
        """A round has ended: whoever asks learns how."""
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
        """End the thread and remove the socket; the ranks learn that this one is gone. Twice is fine."""
        self.interrupt()
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _wait(
        self, deadline: Deadline, step: str, what: str, found: Callable[[], Mapping[int, object]]
    ) -> None:
        """Until every other rank is among what is found. RankRefused for the first that says no, is gone, or is late."""
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
        return {rank: asked.body for rank, asked in self._calls[kind].items()}

    def _reports(self) -> dict[int, ShardsFrozen]:
        return {rank: body for rank, body in self._frozen.items() if body.number == self._number}

    # The thread.

    def _serve(self, listener: Listener[Message]) -> None:
        with listener:
            while not self._closing:
                incoming = self._next(listener)
                if incoming is not None:
                    self._take(listener, incoming)
                self._tell(listener)
                self._probe(listener)
            if self._tell(listener):
                with suppress(DeadlineExceeded):
                    listener.receive(Deadline.after(FAREWELL_S), "the last answers to leave")

    def _next(self, listener: Listener[Message]) -> Incoming[Message] | None:
        ends_s = [asked.ends_s - time.monotonic() for asked in self._asked]
        with self._changed:
            wait_s = min([*ends_s, PROBE_S if self._watchers else IDLE_S])
        try:
            return listener.receive_or_wake(Deadline.after(max(0.0, wait_s)), "a rank of the trainer")
        except DeadlineExceeded:
            return None

    def _take(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        peer, call, body = incoming.peer, incoming.call, incoming.body
        with self._changed:
            match body:
                case RegisterRank(rank=rank) if (
                    body.world == self._world and self._peers.setdefault(rank, peer) == peer
                ):
                    self._calls[RegisterRank][rank] = _Asked(peer=peer, call=call, body=body)
                case AnnounceShards(rank=rank) if self._peers.get(rank) == peer:
                    self._calls[AnnounceShards][rank] = _Asked(peer=peer, call=call, body=body)
                case ShardsFrozen(rank=rank, number=number) if self._peers.get(rank) == peer:
                    if number >= self._number:
                        self._frozen[rank] = body
                case GetOutcome(rank=rank, wait_s=wait_s) if self._peers.get(rank) == peer:
                    self._heard_s[rank] = time.monotonic()
                    self._asked.append(
                        _Asked(peer=peer, call=call, body=body, ends_s=time.monotonic() + wait_s)
                    )
                case other:
                    error = MessageInvalid(f"no rank of this trainer may say {type(other).__name__} now")
                    _send(listener, peer, Refusal(fault=fault_of(error, step="enlist")), call)
            self._changed.notify_all()

    def _tell(self, listener: Listener[Message]) -> bool:
        """Answer what can be answered; whether there was anything."""
        now_s = time.monotonic()
        with self._changed:
            sending, self._outbox, waiting, self._asked = self._outbox, [], self._asked, []
            for asked in waiting:
                number = asked.body.number if isinstance(asked.body, GetOutcome) else 0
                outcome = self._outcomes.get(number)
                if outcome is not None:
                    sending.append((asked.peer, outcome, asked.call))
                elif now_s >= asked.ends_s:
                    sending.append((asked.peer, OutcomePending(begun=number <= self._number), asked.call))
                else:
                    self._asked.append(asked)
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
    """Whether the peer is there. One that does not read delays nobody: it gets nothing."""
    try:
        listener.send(peer, body, call, Deadline.after(0.0))
    except ChannelClosed:
        return False
    except LiveWeightError:
        return True
    return True
