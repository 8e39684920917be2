"""Channels: the side that connects, to one incarnation of one peer.

Owns a link in a private ZMQ context, the numbers of calls and the notifications that came while a reply was awaited.
What a message means is decided by the caller.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import ExitStack
from typing import Generic, Self

import zmq

from liveweight.errors import ChannelClosed, MessageInvalid
from liveweight.spec.deadline import Deadline
from liveweight.wire.codec import NOTIFICATION, Codec, Envelope, Message
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.link import LinkState, establish
from liveweight.wire.sockets import Context, put, take, terminate, unix_path, wait
from liveweight.wire.waker import Waker


class Channel(Generic[Message]):
    """A connection to a listener. Used by one thread, which also closes it; only wakers are shared.

    When the peer ends, every wait ends with ChannelClosed once all that it had sent is read, and the channel stays
    closed: a successor at the same address needs a new channel. `close` drops what is not sent yet: only a reply
    proves that a message arrived.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        codec: Codec[Message],
        limits: WireLimits | None = None,
        *,
        deadline: Deadline,
        cancel: Waker | None = None,
        waits: bool = True,
    ) -> None:
        """Connect, prove the secret both ways and compare protocol versions, or raise and leave nothing open.

        WrongSecret, ProtocolMismatch and ChannelClosed come as soon as they are known. Where nobody listens yet, or
        the listener's owner does not receive, the wait lasts until the deadline; `waits` False is for a peer that was
        there: where nobody listens, the peer has ended. `cancel`, once woken by another
        thread, ends this wait and every later request that does not ask otherwise with ChannelClosed.
        """
        unix_path(address)
        self.address = address
        self._codec = codec
        self._limits = limits or WireLimits()
        self._cancel = cancel
        self._closed = False
        self._calls = itertools.count(NOTIFICATION + 1)
        self._kept: deque[Message] = deque()
        with ExitStack() as acquired:
            self._waker = Waker()
            acquired.callback(self._waker.close)
            context: Context = zmq.Context()
            acquired.callback(terminate, context)
            self._link = establish(context, address, secret, self._limits, deadline, cancel, waits=waits)
            acquired.callback(self._link.close)
            self._greet(deadline)
            self._acquired = acquired.pop_all()

    def send(self, body: Message, deadline: Deadline) -> None:
        """Queue a message that expects no reply."""
        self._send_frame(self._codec.encode(body, call=NOTIFICATION, limits=self._limits), deadline)

    def request(
        self, body: Message, deadline: Deadline, waiting_for: str, *, cancellable: bool = True
    ) -> Message:
        """Send a message and wait for its reply. Notifications that come first are kept for `receive`.

        Cancelled, it is not sent or its reply not awaited; the channel stays open.
        """
        call = next(self._calls)
        cancel = self._cancel if cancellable else None
        _must_go_on(cancel, waiting_for)
        self._send_frame(self._codec.encode(body, call=call, limits=self._limits), deadline, cancel)
        while True:
            envelope = self._wait(deadline, waiting_for, cancel)
            if envelope.call == call:
                return envelope.body
            self._keep(envelope)

    def receive(self, deadline: Deadline, waiting_for: str) -> Message:
        """The next notification. A wake does not end this wait; it stays for the next `receive_or_wake`."""
        while not self._kept:
            self._keep(self._wait(deadline, waiting_for))
        return self._kept.popleft()

    def receive_or_wake(self, deadline: Deadline, waiting_for: str) -> Message | None:
        """The next notification, or None if a waker ended the wait."""
        while True:
            self._must_be_open()
            if self._waker.take():
                return None
            body = self.receive_now()
            if body is not None:
                return body
            deadline.check(waiting_for)
            self._poll(zmq.POLLIN, deadline, self._waker)

    def receive_now(self) -> Message | None:
        """The next notification if one is there. Passes over at most one queue's worth of late replies."""
        for _ in range(self._limits.queue):
            if self._kept:
                return self._kept.popleft()
            envelope = self._envelope_now()
            if envelope is None:
                return None
            self._keep(envelope)
        return None

    def waker(self) -> Waker:
        """What another thread ends `receive_or_wake` with."""
        return self._waker

    def close(self) -> None:
        """Release sockets, threads and descriptors."""
        if self._closed:
            return
        self._closed = True
        self._acquired.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, deadline: Deadline) -> None:
        """Send our protocol version; the peer answers with the same, or refuses."""
        self._send_frame(self._codec.greeting, deadline, self._cancel)
        waiting_for = f"{self.address} to greet"
        while True:
            frame = self._frame_now()
            if frame == self._codec.greeting:
                return
            if frame is not None:
                self._codec.decode(frame, limits=self._limits)
                raise MessageInvalid(f"{self.address} sent a message before its greeting")
            deadline.check(waiting_for)
            _must_go_on(self._cancel, waiting_for)
            self._poll(zmq.POLLIN, deadline, self._cancel)

    def _wait(self, deadline: Deadline, waiting_for: str, cancel: Waker | None = None) -> Envelope[Message]:
        while True:
            envelope = self._envelope_now()
            if envelope is not None:
                return envelope
            deadline.check(waiting_for)
            _must_go_on(cancel, waiting_for)
            self._poll(zmq.POLLIN, deadline, cancel)

    def _keep(self, envelope: Envelope[Message]) -> None:
        """Keep a notification; drop a reply, for the call that it answers was given up."""
        if envelope.call != NOTIFICATION:
            return
        if len(self._kept) >= self._limits.queue:
            self.close()
            raise ChannelClosed(f"{self.address} sent more than {self._limits.queue} unread notifications")
        self._kept.append(envelope.body)

    def _envelope_now(self) -> Envelope[Message] | None:
        frame = self._frame_now()
        return None if frame is None else self._codec.decode(frame, limits=self._limits)

    def _frame_now(self) -> bytes | None:
        """The next frame if one is there. The link is polled first; its end counts once nothing is left to read."""
        state = self._poll_link()
        parts = take(self._link.socket, parts=1)
        if parts is None:
            if state is LinkState.GONE:
                raise ChannelClosed(f"{self.address} is gone")
            return None
        if len(parts) > 1:
            raise MessageInvalid("a frame comes alone, not in parts")
        return parts[0]

    def _send_frame(self, frame: bytes, deadline: Deadline, cancel: Waker | None = None) -> None:
        while True:
            if self._poll_link() is LinkState.GONE:
                raise ChannelClosed(f"{self.address} is gone")
            if put(self._link.socket, frame):
                return
            deadline.check(f"{self.address} to take a message")
            _must_go_on(cancel, f"{self.address} to take a message")
            self._poll(zmq.POLLOUT, deadline, cancel)

    def _must_be_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"this channel to {self.address} was closed")

    def _poll_link(self) -> LinkState:
        self._must_be_open()
        return self._link.poll()

    def _poll(self, event: int, deadline: Deadline, waker: Waker | None = None) -> None:
        """Wait for that event, an event of the link or, if one is given, a waker; at most until the deadline."""
        wakers = () if waker is None else (waker.fileno(),)
        wait(deadline, {self._link.socket: event, self._link.monitor: zmq.POLLIN}, *wakers)


def _must_go_on(cancel: Waker | None, waiting_for: str) -> None:
    if cancel is not None and cancel.woken:
        raise ChannelClosed(f"the wait for {waiting_for} was ended from this side")
