"""The pull server: offers one version of a source to engines that pull, and grants them read leases.

Owns a listener and its thread. The publisher decides what is offered and when its memory may change: it first clears the pull server, waits
a limited time for readers to finish, and then puts the next version there. A read lease ends when it expires or its reader is gone.
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
from liveweight.spec.manifest import KeptSet, Manifest, Version
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Message
from liveweight.wire.messages.body import Refusal, refuse_call
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
"""How often readers get a MemoryWanted, which also shows whether they are gone."""


class NothingOffered(enum.Enum):
    """Why nothing is on offer: EMPTY, no version was put or the last one has ended; CHANGING, the next version is being made."""

    EMPTY = "empty"
    CHANGING = "changing"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedVersion:
    """A version that engines may pull. `structure` is the name of its manifest; `kept` are tensors that engines keep."""

    version: Version
    structure: str
    manifest: Manifest
    digests: bytes | None
    offer: Offer
    kept: KeptSet | None = None


State: TypeAlias = OfferedVersion | NothingOffered


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    peer: bytes
    requester: str
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCall:
    """A call that is not answered yet. It is answered by `ends_s` at the latest."""

    peer: bytes
    call: int
    body: AcquireReadLease
    ends_s: float


class PullServer:
    """One source's pull server. All methods are for the thread that offers; requesters are answered on a thread of its own."""

    def __init__(self, address: str, secret: Secret, *, bus: Bus) -> None:
        """Listen there. Nothing is offered before the first `put`."""
        self._bus = bus
        self._changed = threading.Condition()
        self._state: State = NothingOffered.EMPTY
        self._readers: dict[int, _Reader] = {}
        self._wanted: Deadline | None = None
        self._reads = 0
        self._leased = False
        self._numbers = itertools.count(1)
        self._pending_calls: list[_PendingCall] = []
        self._closing = False
        self._limits, self._codec = WireLimits(), Codec[Message](Message)
        listener = Listener(address, secret, self._codec, self._limits, refuse=refuse_call, bus=bus)
        self.address, self._waker = listener.address, listener.waker()
        self._thread = threading.Thread(  # from here on the listener is the thread's
            target=self._serve, args=(listener,), name="liveweight-pull-server", daemon=True
        )
        self._thread.start()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Grant no read lease while the next version is being made. If the block does not `put` it, the pull server is empty afterwards."""
        self._set_state(NothingOffered.CHANGING)
        try:
            yield
        finally:
            with self._changed:
                failed = self._state is NothingOffered.CHANGING
            if failed:
                self._set_state(NothingOffered.EMPTY)

    def wait_for_readers(self, deadline: Deadline) -> None:
        """Wait for all read leases to end, until the deadline. Leases that are left end here: the caller is about to revoke the offer."""
        with self._changed:
            self._wanted = deadline
            self._waker.wake()
            try:
                self._changed.wait_for(lambda: not self._readers, deadline.remaining_s())
            finally:  # interrupted, nothing is revoked: the next offer waits again
                self._wanted = None
            revoked = tuple(reader.requester for reader in self._readers.values())
            self._readers.clear()
        if revoked:
            self._bus.emit(events.ReadersRevoked(readers=revoked, waited_s=deadline.waited_s()))

    def put(self, version: OfferedVersion) -> None:
        """Offer that version. Raises MessageTooLarge if it does not fit into one message."""
        self._codec.encode(self._granted(0, version), call=1, limits=self._limits)
        with self._changed:
            self._reads = 0
            self._leased = False
        self._set_state(version)

    @property
    def leased(self) -> bool:
        """Whether anyone was granted a read lease on the version that was put last, and may serve it. Final within `changing`."""
        with self._changed:
            return self._leased

    def wait_until_read(self, deadline: Deadline, readers: int = 1) -> None:
        """Wait until that many readers have read the version whole; then stop offering it. DeadlineExceeded says how many
        have."""
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._reads >= readers, deadline.remaining_s()):
                    waited_for = f"{readers} readers" if readers > 1 else "a reader"
                    raise deadline.exceeded(
                        f"{waited_for} of what {self.address} offers ({self._reads} have read it)"
                    )
        finally:
            self._set_state(NothingOffered.EMPTY)

    def close(self) -> None:
        """End the thread and remove the socket; readers notice that the source is gone. May be called twice."""
        self._closing = True
        self._waker.wake()
        self._thread.join()

    def _set_state(self, state: State) -> None:
        with self._changed:
            self._state = state
        self._waker.wake()

    # The thread.

    def _serve(self, listener: Listener[Message]) -> None:
        with listener:
            while not self._closing:
                incoming = self._next(listener)
                if incoming is not None:
                    self._handle(listener, incoming)
                self._answer(listener)
                self._probe(listener)

    def _next(self, listener: Listener[Message]) -> Incoming[Message] | None:
        ends_s = [pending.ends_s - time.monotonic() for pending in self._pending_calls]
        with self._changed:
            probing = self._wanted is not None and bool(self._readers)
        wait_s = min([*ends_s, PROBE_S if probing else IDLE_S])
        try:
            return listener.receive_or_wake(Deadline.after(max(0.0, wait_s)), "a requester")
        except DeadlineExceeded:
            return None

    def _handle(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        match incoming.body:
            case AcquireReadLease(wait_s=wait_s) as body:
                ends_s = time.monotonic() + wait_s
                self._pending_calls.append(
                    _PendingCall(peer=incoming.peer, call=incoming.call, body=body, ends_s=ends_s)
                )
            case ReleaseReadLease(lease=number, read=read):
                _send(listener, incoming.peer, self._released(number, incoming.peer, read), incoming.call)
            case other:
                error = MessageInvalid(f"a source is asked to lease a version, not {type(other).__name__}")
                refusal = Refusal(fault=fault_of(error, step="hold"))
                _send(listener, incoming.peer, refusal, incoming.call)

    def _answer(self, listener: Listener[Message]) -> None:
        """Answer the pending calls; while the next version is being made, only calls that have waited as long as they wanted."""
        with self._changed:
            state = self._state
        now_s, waiting, self._pending_calls = time.monotonic(), self._pending_calls, []
        for pending in waiting:
            if state is NothingOffered.CHANGING and now_s < pending.ends_s:
                self._pending_calls.append(pending)
            elif isinstance(state, OfferedVersion) and pending.body.version in (
                None,
                str(state.version.label),
            ):
                self._grant(listener, pending, state)
            else:
                offered = (state.version,) if isinstance(state, OfferedVersion) else ()
                answer = ReadLeaseRefused(offered=offered, changing=state is NothingOffered.CHANGING)
                _send(listener, pending.peer, answer, pending.call)

    def _grant(self, listener: Listener[Message], pending: _PendingCall, state: OfferedVersion) -> None:
        """Record the read lease before answering; unless the offer began to change just now."""
        number, ends_s = next(self._numbers), time.monotonic() + pending.body.lease_s
        reader = _Reader(peer=pending.peer, requester=pending.body.requester, ends_s=ends_s)
        with self._changed:
            if self._state is not state:
                self._pending_calls.append(pending)  # the thread was woken for the change, and answers again
                return
            self._readers[number] = reader
            self._leased = True
        if not _send(listener, pending.peer, self._granted(number, state), pending.call):
            self._end_lease(number, pending.peer)

    def _end_lease(self, number: int, peer: bytes) -> bool:
        """End a read lease. Returns whether it existed."""
        with self._changed:
            reader = self._readers.get(number)
            known = reader is not None and reader.peer == peer
            if known:
                del self._readers[number]
                self._changed.notify_all()
            return known

    def _released(self, number: int, peer: bytes, read: bool) -> ReadLeaseReleased:
        with self._changed:
            known = self._end_lease(number, peer)
            self._reads += known and read
        return ReadLeaseReleased(revoked=not known)

    def _probe(self, listener: Listener[Message]) -> None:
        """End expired leases. While the publisher waits for the memory, also tell the readers; a reader that cannot be reached is gone."""
        with self._changed:
            wanted, readers = self._wanted, dict(self._readers)
        for number, reader in readers.items():
            over = time.monotonic() >= reader.ends_s
            if over or (
                wanted is not None
                and not _send(
                    listener, reader.peer, MemoryWanted(lease=number, within_s=wanted.remaining_s()), call=0
                )
            ):
                self._end_lease(number, reader.peer)

    def _granted(self, number: int, state: OfferedVersion) -> ReadLeaseGranted:
        return ReadLeaseGranted(
            lease=number,
            version=state.version,
            structure=state.structure,
            manifest=state.manifest,
            kept=state.kept,
            digests=state.digests,
            offer=state.offer,
        )


def _send(listener: Listener[Message], peer: bytes, body: Message, call: int) -> bool:
    """Send without waiting; returns whether the peer is there. A peer that does not read its messages loses this one."""
    try:
        listener.send(peer, body, call, Deadline.after(0.0))
    except ChannelClosed:
        return False
    except LiveWeightError:
        return True
    return True
