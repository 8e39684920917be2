"""Links: one connection to one incarnation of a peer, and its state.

Owns a DEALER socket with its monitor, and the decision what a failed hand-shake means.
A link is never connected again: a message to one process must not reach its successor.
"""

from __future__ import annotations

import enum
import itertools
import select
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import parse_monitor_message

from liveweight.errors import AddressUnusable, ChannelClosed, WrongSecret
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import Secret, client_keys, server_keys
from liveweight.wire.limits import WireLimits
from liveweight.wire.sockets import Context, configure, make, milliseconds, nobody_listens, signals_held, wait
from liveweight.wire.waker import Waker

_NEVER_AGAIN_MS = 24 * 3600 * 1000
"""ZMQ's pause before it connects again. Not -1: that drops what the peer sent before it ended."""
_DROPS_TOLERATED = 2
"""A hand-shake cut short is a wrong secret or a peer that just ended; the latter does not happen three times."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_numbers = itertools.count()


class LinkState(enum.Enum):
    """The state of a link. All but the first two are final."""

    CONNECTING = "connecting"
    UP = "up"
    ABSENT = "nobody listens"
    DROPPED = "closed during the hand-shake"
    REFUSED = "hand-shake refused"
    GONE = "gone"


def after(state: LinkState, event: int) -> LinkState:
    """The state that follows an event of ZMQ's monitor."""
    match state, event:
        case LinkState.UP, zmq.EVENT_DISCONNECTED:
            return LinkState.GONE
        case LinkState.CONNECTING, zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return LinkState.UP
        case LinkState.CONNECTING, zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return LinkState.REFUSED
        case LinkState.CONNECTING, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED:
            return LinkState.DROPPED
        case LinkState.CONNECTING, zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED:
            return LinkState.ABSENT
        case _:
            return state


class Link:
    """A DEALER socket and its monitor. `state` is what `poll` last learned."""

    def __init__(self, context: Context, address: str, secret: Secret, limits: WireLimits) -> None:
        self.state = LinkState.CONNECTING
        with signals_held(), ExitStack() as acquired:
            self.socket = make(context, zmq.DEALER)
            acquired.callback(self.socket.close)
            self.monitor = make(context, zmq.PAIR)
            acquired.callback(self.monitor.close)
            try:
                self._connect(address, secret, limits)
            except zmq.ZMQError as error:
                raise AddressUnusable(
                    f"cannot connect to {address}: {zmq.strerror(error.errno or 0)}"
                ) from error
            acquired.callback(self.socket.monitor, None, 0)
            self._acquired = acquired.pop_all()

    def _connect(self, address: str, secret: Secret, limits: WireLimits) -> None:
        keys = client_keys(secret)
        configure(self.socket, address, limits)
        self.socket.reconnect_ivl = _NEVER_AGAIN_MS
        self.socket.curve_publickey = keys.public
        self.socket.curve_secretkey = keys.private
        self.socket.curve_serverkey = server_keys(secret).public
        events = f"inproc://link-{next(_numbers)}"
        self.socket.monitor(events, _EVENTS)
        self.monitor.linger = 0
        self.monitor.connect(events)
        self.socket.connect(address)

    def poll(self) -> LinkState:
        """Read the events of the monitor. Returns the state."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return self.state
            self.state = after(self.state, event["event"])

    def settle(self, deadline: Deadline, cancel: Waker | None = None) -> LinkState:
        """Wait until the hand-shake has ended, or the deadline; or until it is cancelled."""
        while self.poll() is LinkState.CONNECTING and not deadline.over:
            if cancel is None:
                wait(deadline, {self.monitor: zmq.POLLIN})
            elif cancel.woken:
                break
            else:
                wait(deadline, {self.monitor: zmq.POLLIN}, cancel.fileno())
        return self.state

    def close(self) -> None:
        """Release both sockets."""
        with signals_held():
            self._acquired.close()


def establish(
    context: Context,
    address: str,
    secret: Secret,
    limits: WireLimits,
    deadline: Deadline,
    cancel: Waker | None = None,
    *,
    waits: bool = True,
) -> Link:
    """A link whose hand-shake succeeded. Tries until the deadline, or until it is cancelled, where nobody listens yet.

    Raises WrongSecret, without waiting longer, when somebody does listen but does not hold the secret; and ChannelClosed, unless it
    `waits`, when nobody does.
    """
    drops = 0
    pause_s = _FIRST_PAUSE_S
    while True:
        link = Link(context, address, secret, limits)
        try:
            state = link.settle(deadline, cancel)
        except BaseException:
            link.close()
            raise
        if state is LinkState.UP:
            return link
        link.close()
        drops += state is LinkState.DROPPED
        if state is LinkState.REFUSED or drops > _DROPS_TOLERATED:
            raise WrongSecret(f"{address}: {state.value}; the peer does not hold our secret, or we not its")
        if not waits and nobody_listens(address, deadline):
            raise ChannelClosed(f"{address} is gone: nobody listens there")
        if cancel is not None and cancel.woken:
            raise ChannelClosed(f"the wait for {address}, where {_missing(state)}, was ended from this side")
        deadline.check(f"{address}, where {_missing(state)}")
        select.poll().poll(milliseconds(deadline.within(pause_s)))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _missing(state: LinkState) -> str:
    return "the hand-shake did not end" if state is LinkState.CONNECTING else state.value
