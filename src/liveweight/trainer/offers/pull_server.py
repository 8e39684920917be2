"""The pull server: the version that a source holds ready for engines that ask for it, and who reads it at the moment.

Owns a listener and its thread. What is offered, and when its memory may change, is the publisher's: it clears the pull server before that,
waits a while for those who read, and puts the next version there. Who is gone, or whose lease is over, holds nothing.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from liveweight.errors import ChannelClosed, DeadlineExceeded, LiveWeightError, MessageInvalid
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Message
from liveweight.wire.messages.body import Refusal
from liveweight.wire.messages.source import (
    AcquireReadLease,
    MemoryWanted,
    ReadLeaseGranted,
    ReadLeaseRefused,
    ReadLeaseReleased,
    ReleaseReadLease,
)
from liveweight.wire.messages.values import Offer, fault_of

IDLE_S = 3600.0
PROBE_S = 0.2
"""How often those who read are told that the memory is wanted, and are found to be gone."""


class NothingOffered(enum.Enum):
    """Nothing is on offer: so far or any more; or for the moment, while the next version is made."""

    EMPTY = "empty"
    CHANGING = "changing"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedVersion:
    """A version that may be asked for."""

    version: Version
    digests: bytes | None
    offer: Offer


State: TypeAlias = OfferedVersion | NothingOffered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    peer: bytes
    requester: str
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call that is not answered yet; at the latest then."""

    peer: bytes
    call: int
    body: AcquireReadLease
    ends_s: float


class PullServer:
    """One source's pull server. All methods are for the thread that offers; requesters are answered on a thread of its own."""

    def __init__(self, address: str, secret: Secret, *, structure: str, manifest: Manifest, bus: Bus) -> None:
        """Listen there. `manifest` is that of every version, and `structure` its name."""
        self._structure, self._manifest, self._bus = structure, manifest, bus
        self._changed = threading.Condition()
        self._state: State = NothingOffered.EMPTY
        self._holders: dict[int, _Holder] = {}
        self._wanted: Deadline | None = None
        self._read = False
        self._numbers = itertools.count(1)
        self._asked: list[_Asked] = []
        self._closing = False
        self._limits, self._codec = WireLimits(), Codec[Message](Message)
        listener = Listener(address, secret, self._codec, self._limits)
        self.address, self._waker = listener.address, listener.waker()
        self._thread = threading.Thread(  # from here on the listener is the thread's
            target=self._serve, args=(listener,), name="liveweight-shelf", daemon=True
        )
        self._thread.start()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The next version is being made: nobody is let in meanwhile. If it is not put here, the pull server is empty."""
        self._become(NothingOffered.CHANGING)
        try:
            yield
        finally:
            with self._changed:
                failed = self._state is NothingOffered.CHANGING
            if failed:
                self._become(NothingOffered.EMPTY)

    def wait_for_readers(self, deadline: Deadline) -> None:
        """Wait until nobody reads any more, a while. Those who still do are forgotten: their offer is about to be revoked."""
        with self._changed:
            self._wanted = deadline
            self._waker.wake()
            try:
                self._changed.wait_for(lambda: not self._holders, deadline.remaining_s())
            finally:  # interrupted, nothing is revoked: the next offer waits again
                self._wanted = None
            left = tuple(holder.requester for holder in self._holders.values())
            self._holders.clear()
        if left:
            self._bus.emit(events.ReadersRevoked(readers=left, waited_s=deadline.waited_s()))

    def put(self, version: OfferedVersion) -> None:
        """Hold that version ready. MessageTooLarge if it could not be told to anyone."""
        self._codec.encode(self._held(0, version), call=1, limits=self._limits)
        self._read = False
        self._become(version)

    def wait_until_read(self, deadline: Deadline) -> None:
        """Wait until one who held the version has given it back; then it is on offer no more."""
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._read, deadline.remaining_s()):
                    raise deadline.exceeded(f"somebody to read what {self.address} offers")
        finally:
            self._become(NothingOffered.EMPTY)

    def close(self) -> None:
        """End the thread and remove the socket; who reads learns that the source is gone. Twice is fine."""
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _become(self, state: State) -> None:
        with self._changed:
            self._state = state
        self._waker.wake()

    # The thread.

    def _serve(self, listener: Listener[Message]) -> None:
        with listener:
            while not self._closing:
                incoming = self._next(listener)
                if incoming is not None:
                    self._take(listener, incoming)
                self._answer(listener)
                self._probe(listener)

    def _next(self, listener: Listener[Message]) -> Incoming[Message] | None:
        ends_s = [asked.ends_s - time.monotonic() for asked in self._asked]
        with self._changed:
            probing = self._wanted is not None and bool(self._holders)
        wait_s = min([*ends_s, PROBE_S if probing else IDLE_S])
        try:
            return listener.receive_or_wake(Deadline.after(max(0.0, wait_s)), "a requester")
        except DeadlineExceeded:
            return None

    def _take(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        match incoming.body:
            case AcquireReadLease(wait_s=wait_s) as body:
                ends_s = time.monotonic() + wait_s
                self._asked.append(_Asked(peer=incoming.peer, call=incoming.call, body=body, ends_s=ends_s))
            case ReleaseReadLease(lease=number):
                _send(listener, incoming.peer, self._released(number, incoming.peer), incoming.call)
            case other:
                error = MessageInvalid(f"a source is asked to lease a version, not {type(other).__name__}")
                refusal = Refusal(fault=fault_of(error, step="hold"))
                _send(listener, incoming.peer, refusal, incoming.call)

    def _answer(self, listener: Listener[Message]) -> None:
        """Answer those who asked; while the offer changes, only those who have waited long enough."""
        with self._changed:
            state = self._state
        now_s, waiting, self._asked = time.monotonic(), self._asked, []
        for asked in waiting:
            if state is NothingOffered.CHANGING and now_s < asked.ends_s:
                self._asked.append(asked)
            elif isinstance(state, OfferedVersion) and asked.body.version in (None, str(state.version.label)):
                self._let_in(listener, asked, state)
            else:
                offered = (state.version,) if isinstance(state, OfferedVersion) else ()
                answer = ReadLeaseRefused(offered=offered, changing=state is NothingOffered.CHANGING)
                _send(listener, asked.peer, answer, asked.call)

    def _let_in(self, listener: Listener[Message], asked: _Asked, state: OfferedVersion) -> None:
        """It holds the version from before it hears of it; unless the offer began to change just now."""
        number, ends_s = next(self._numbers), time.monotonic() + asked.body.lease_s
        holder = _Holder(peer=asked.peer, requester=asked.body.requester, ends_s=ends_s)
        with self._changed:
            if self._state is not state:
                self._asked.append(asked)  # we were woken for that, and look again
                return
            self._holders[number] = holder
        if not _send(listener, asked.peer, self._held(number, state), asked.call):
            self._let_go(number, asked.peer)

    def _let_go(self, number: int, peer: bytes) -> bool:
        """End a read lease; whether it was there."""
        with self._changed:
            holder = self._holders.get(number)
            known = holder is not None and holder.peer == peer
            if known:
                del self._holders[number]
                self._changed.notify_all()
            return known

    def _released(self, number: int, peer: bytes) -> ReadLeaseReleased:
        with self._changed:
            known = self._let_go(number, peer)
            self._read |= known
        return ReadLeaseReleased(revoked=not known)

    def _probe(self, listener: Listener[Message]) -> None:
        """While somebody waits for the memory: tell those who read. Who cannot be told is gone."""
        with self._changed:
            wanted, holders = self._wanted, dict(self._holders)
        for number, holder in holders.items():
            over = time.monotonic() >= holder.ends_s
            if over or (
                wanted is not None
                and not _send(
                    listener, holder.peer, MemoryWanted(lease=number, within_s=wanted.remaining_s()), call=0
                )
            ):
                self._let_go(number, holder.peer)

    def _held(self, number: int, state: OfferedVersion) -> ReadLeaseGranted:
        return ReadLeaseGranted(
            lease=number,
            version=state.version,
            structure=self._structure,
            manifest=self._manifest,
            digests=state.digests,
            offer=state.offer,
        )


def _send(listener: Listener[Message], peer: bytes, body: Message, call: int) -> bool:
    """Whether the peer is there. One that does not read delays nobody: it gets nothing."""
    try:
        listener.send(peer, body, call, Deadline.after(0.0))
    except ChannelClosed:
        return False
    except LiveWeightError:
        return True
    return True
