"""The leader server: the thread and the sockets around a replica's leader, in rank 0's process or in an engine's.

Owns the listener that publishers and ranks connect to, and the process watch over them. It carries out the actions of
rounds/leader and decides nothing itself. A decision for the ranks goes to a DecisionSink, from which the program takes it at a boundary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from liveweight.errors import ChannelClosed, DeadlineExceeded
from liveweight.observe.bus import Bus
from liveweight.rounds.boundary import Decision, DecisionSink
from liveweight.rounds.leader.leader import Leader
from liveweight.rounds.leader.round_record import (
    Action,
    EmitEvent,
    NotifyRank,
    PutDecision,
    SendReply,
    WithdrawDecision,
)
from liveweight.rounds.process_watch import ProcessWatch
from liveweight.rounds.states import OverwritingState, ReleasedState, SwappingState, serving_version, torn_by
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Join, Message, Open
from liveweight.wire.messages.body import refuse_call

IDLE_S = 60.0
WATCH_S = 0.2
SEND_S = 5.0
PUBLISHER = -1
"""Stands for the process that opened the round, where a rank's number is expected."""


class LeaderServer:
    """Serves one replica until closed. Construct and close from one thread."""

    def __init__(
        self,
        *,
        address: str,
        secret: Secret,
        replica: str,
        boot: str,
        world: int,
        bus: Bus,
        decisions: DecisionSink,
        takes_over: bool = False,
    ) -> None:
        """`takes_over`: listen at `address` even if another process listens there now, because peers want this one."""
        self._decisions, self._bus = decisions, bus
        self._leader = Leader(replica=replica, boot=boot, world=world)
        self._watch: ProcessWatch[int] = ProcessWatch()
        self._next_check_s = 0.0
        self._closing = False
        listener: Listener[Message] = Listener(
            address, secret, Codec(Message), takes_over=takes_over, refuse=refuse_call, bus=bus
        )
        self.address, self._waker = listener.address, listener.waker()
        self._thread = threading.Thread(  # from here on the listener is the thread's
            target=self._run, args=(listener,), name="liveweight-leader", daemon=True
        )
        self._thread.start()

    @property
    def served(self) -> Version | None:
        """The version that all ranks held after the last decision. A swap whose outcome no rank was told does not count, nor does one that
        tore a rank. For any thread: a decision is recorded before anybody is told of it."""
        state = self._leader.state
        if torn_by(state) is not None:
            members = list(self._leader.membership.members.values())
            return members[0].serving if members else None
        match state:
            case SwappingState(base=base) | OverwritingState(base=base):
                return base
            case ReleasedState(version=version):
                return version
            case _:
                return serving_version(state)

    def note_handshake(self, token: str) -> None:
        """Report this token in `ReplicaState.met` from now on: a controller of the engine sent it to the engine. For any thread."""
        self._leader.membership.handshakes.append(token)

    def report_not_serving(self, not_serving: Callable[[], str | None]) -> None:
        """Report what this returns in `ReplicaState.not_serving` from now on. It is called on the leader's thread."""
        self._leader.not_serving = not_serving

    def close(self) -> None:
        """End the thread; peers learn that the replica is gone."""
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _run(self, listener: Listener[Message]) -> None:
        try:
            with listener:
                while not self._closing:
                    self._carry_out(listener, self._next(listener))
        finally:
            self._watch.close()

    def _next(self, listener: Listener[Message]) -> list[Action]:
        """Wait for a message or a timeout, and return the leader's actions."""
        now_s = time.monotonic()
        until_s = min(self._leader.next_s() - now_s, IDLE_S)
        if self._leader.needs_ranks:
            until_s = min(
                until_s, self._next_check_s - now_s
            )  # only then does the death of a rank matter at once
        try:
            incoming = listener.receive_or_wake(Deadline.after(max(0.0, until_s)), "a message")
        except DeadlineExceeded:
            incoming = None
        now_s = time.monotonic()
        if incoming is None:
            return self._check_processes(now_s) + self._leader.on_time(now_s)
        actions = self._leader.on_message(now_s, incoming.peer, incoming.call, incoming.body)
        self._watch_peer(incoming)
        return actions + self._check_processes(now_s)

    def _watch_peer(self, incoming: Incoming[Message]) -> None:
        match incoming.body:
            case Join(rank=rank, host=host, pid=pid):
                member = self._leader.membership.members.get(rank)
                if member is not None and member.peer == incoming.peer:  # otherwise it was refused
                    self._watch.watch(rank, host, pid)
            case Open(publisher=publisher, host=host, pid=pid):
                opened = self._leader.open_request
                if opened is not None and opened.publisher == publisher:  # otherwise it was refused
                    self._watch.watch(PUBLISHER, host, pid)
            case _:
                return

    def _check_processes(self, now_s: float) -> list[Action]:
        """Check for ended processes every WATCH_S, however many messages arrive in between."""
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + WATCH_S
        actions: list[Action] = []
        for who in self._watch.ended():
            if who == PUBLISHER:
                actions += self._leader.on_publisher_lost(now_s)
            else:
                actions += self._leader.on_lost(now_s, who)
        return actions

    def _carry_out(self, listener: Listener[Message], actions: list[Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case SendReply(peer=peer, call=call, body=body):
                    self._send(listener, peer, body, call)
                case NotifyRank(rank=rank, body=body):
                    member = self._leader.membership.members.get(rank)
                    if member is not None and not self._send(listener, member.peer, body, 0):
                        todo.extend(self._leader.on_lost(time.monotonic(), rank))
                case PutDecision(round=round_id, undo=undo, timeout_s=timeout_s, kv_policy=policy):
                    self._decisions.put(round_id, Decision(round_id.epoch, undo, timeout_s, policy))
                case WithdrawDecision(round=round_id):
                    waited = self._decisions.withdraw(round_id)
                    todo.extend(self._leader.on_withdrawn(time.monotonic(), round_id, waited=waited))
                case EmitEvent(event=event):
                    self._bus.emit(event)

    def _send(self, listener: Listener[Message], peer: bytes, body: Message, call: int) -> bool:
        """Returns whether the peer took it. A caller that is gone needs no answer."""
        try:
            listener.send(peer, body, call, Deadline.after(SEND_S))
        except (ChannelClosed, DeadlineExceeded):
            return False
        return True
