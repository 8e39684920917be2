"""Listeners: the side of a channel that many peers may reach.

Owns a ROUTER socket in a private ZMQ context, and the authenticator that admits only holders of the secret.
What a message means, and who gets an answer, is decided by the caller.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Self

import zmq

from liveweight.errors import AddressUnusable, ChannelClosed, MessageInvalid, ProtocolMismatch, WireError
from liveweight.observe import events
from liveweight.observe.bus import Bus
from liveweight.spec.deadline import Deadline
from liveweight.wire.authenticator import DOMAIN, Authenticator
from liveweight.wire.codec import NOTIFICATION, REFUSAL, Codec, Message, version_of
from liveweight.wire.credentials import Secret, client_keys, server_keys, socket_directory
from liveweight.wire.limits import WireLimits
from liveweight.wire.sockets import (
    Context,
    configure,
    make,
    milliseconds,
    put,
    refuse_if_taken,
    signals_held,
    take,
    terminate,
    unix_path,
    unlink_if_same,
    wait,
)
from liveweight.wire.waker import Waker

_PARTS = 2
"""The peer, then the frame."""


@dataclass(frozen=True, slots=True)
class Incoming(Generic[Message]):
    """A message, the peer that it came from and the call that a reply must carry; call 0 expects none."""

    peer: bytes
    call: int
    body: Message


class Listener(Generic[Message]):
    """Receives from all peers and answers each. Used by one thread, which also closes it; only wakers are shared.

    Peers are admitted to the socket by a thread of its own, but greeted in `receive`: a peer's connect ends only when
    the owner receives. Frames that are no message of ours are counted, told to the bus and dropped; one that can be read as a call is
    answered. `close` drops what is not sent yet.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        codec: Codec[Message],
        limits: WireLimits | None = None,
        *,
        takes_over: bool = False,
        refuse: Callable[[WireError], Message] | None = None,
        bus: Bus | None = None,
    ):
        """Listen at `ipc://path`, in a directory that is ours alone, or `tcp://host:port`, where port 0 is any. `takes_over`: also at a
        path where another process listens, which nobody new reaches any more. `refuse` makes the answer to a call whose message cannot
        be decoded; without it, the caller waits until its deadline. PeerRefused goes to `bus`."""
        self.refused = 0
        """Frames dropped because they were no message of ours."""
        self.last_refusal: WireError | None = None
        """Why the last of them was dropped."""
        self._codec, self._refuse, self._bus = codec, refuse, bus
        self._limits = limits or WireLimits()
        path = unix_path(address)
        if path is not None:
            socket_directory(path.parent)
            refuse_if_taken(path, takes_over=takes_over)
        self._closed = False
        with ExitStack() as acquired:
            self._waker = Waker()
            acquired.callback(self._waker.close)
            context: Context = zmq.Context()
            acquired.callback(terminate, context)
            acquired.callback(Authenticator(context, client_keys(secret).public).close)
            self._socket = make(context, zmq.ROUTER)
            acquired.callback(self._socket.close)
            with signals_held():
                self._bind(address, secret)
            if path is not None:
                acquired.callback(unlink_if_same, path, path.lstat())
            self._acquired = acquired.pop_all()
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        """Where peers connect to; with the port that was chosen."""

    def _bind(self, address: str, secret: Secret) -> None:
        keys = server_keys(secret)
        configure(self._socket, address, self._limits)
        self._socket.router_mandatory = True
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public
        self._socket.curve_secretkey = keys.private
        self._socket.zap_domain = DOMAIN
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise AddressUnusable(f"cannot listen at {address}: {zmq.strerror(error.errno or 0)}") from error

    def receive(self, deadline: Deadline, waiting_for: str) -> Incoming[Message]:
        """The next message. A wake does not end this wait; it stays for the next `receive_or_wake`."""
        while True:
            incoming = self.receive_now()
            if incoming is not None:
                return incoming
            deadline.check(waiting_for)
            wait(deadline, {self._socket: zmq.POLLIN})

    def receive_or_wake(self, deadline: Deadline, waiting_for: str) -> Incoming[Message] | None:
        """The next message, or None if a waker ended the wait."""
        while True:
            self._must_be_open()
            if self._waker.take():
                return None
            incoming = self.receive_now()
            if incoming is not None:
                return incoming
            deadline.check(waiting_for)
            wait(deadline, {self._socket: zmq.POLLIN}, self._waker.fileno())

    def receive_now(self) -> Incoming[Message] | None:
        """The next message if one is there. Passes over at most one queue's worth of bad frames."""
        self._must_be_open()
        for _ in range(self._limits.queue):
            parts = take(self._socket, parts=_PARTS)
            if parts is None:
                return None
            incoming = self._judge(parts)
            if incoming is not None:
                return incoming
        return None

    def send(self, peer: bytes, body: Message, call: int, deadline: Deadline) -> None:
        """Queue a reply to that call, or a notification (call 0). Raises ChannelClosed if the peer is gone."""
        self._must_be_open()
        frame = self._codec.encode(body, call=call, limits=self._limits)
        commands = select.poll()
        commands.register(self._socket.fileno(), select.POLLIN)
        while True:
            self._socket.get(
                zmq.EVENTS
            )  # processes pending events, so that the descriptor shows only new ones
            if put(self._socket, peer, frame):
                return
            deadline.check(f"peer {peer.hex()} to take a message")
            commands.poll(milliseconds(deadline))

    def waker(self) -> Waker:
        """What another thread ends `receive_or_wake` with."""
        return self._waker

    def close(self) -> None:
        """Release socket, threads and descriptors. Peers learn that we are gone."""
        if self._closed:
            return
        self._closed = True
        self._acquired.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_be_open(self) -> None:
        if self._closed:
            raise ChannelClosed("this listener was closed")

    def _judge(self, parts: list[bytes]) -> Incoming[Message] | None:
        """The message in these parts; None after answering a greeting, or after refusing what is none of ours."""
        peer, *frames = parts
        try:
            if len(frames) != 1:
                raise MessageInvalid(f"a frame comes alone, not in {len(frames)} parts")
            if frames[0] == self._codec.greeting:
                self._answer(peer, self._codec.greeting)
                return None
            envelope = self._codec.decode(frames[0], limits=self._limits)
        except WireError as error:
            self.refused += 1
            self.last_refusal = error
            if isinstance(error, ProtocolMismatch) and version_of(frames[0]) != REFUSAL:
                self._answer(peer, self._codec.refusal(error.theirs))
            elif len(frames) == 1:
                self._answer_call(peer, frames[0], error)
            if self._bus is not None:
                self._bus.emit(events.PeerRefused(code=error.code, reason=str(error)))
            return None
        return Incoming(peer, envelope.call, envelope.body)

    def _answer_call(self, peer: bytes, frame: bytes, error: WireError) -> None:
        """Tell the caller why its message cannot be read, if the frame says that an answer is expected."""
        call = self._codec.call_of(frame, limits=self._limits)
        if call != NOTIFICATION and self._refuse is not None:
            self._answer(peer, self._codec.encode(self._refuse(error), call=call, limits=self._limits))

    def _answer(self, peer: bytes, frame: bytes) -> None:
        """Send it now or not at all: a peer that is gone or does not read needs no answer."""
        try:
            put(self._socket, peer, frame)
        except ChannelClosed:
            return
