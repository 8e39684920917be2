"""Attaching, which all transfer modes share: a rank asks a source where the memory of a layout lies.

Owns both ends of that request: the source's socket with the thread that answers, and the rank's call. The transfer mode defines the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from liveweight.errors import ChannelClosed, DeadlineExceeded, MessageInvalid
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.limits import WireLimits
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Attach, Attached, GetShardLayout, Message, Refusal
from liveweight.wire.messages.body import refuse_call
from liveweight.wire.messages.values import Offer, fault_of

_IDLE_S = 3600.0


Request = TypeVar("Request", Attach, GetShardLayout)


class AttachServer(Generic[Request]):
    """Answers ranks in a thread of its own, until closed. That thread calls `reply` with requests of type `request`."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        limits: WireLimits,
        reply: Callable[[Request], Message],
        *,
        name: str,
        request: type[Request],
    ) -> None:
        self._reply: Callable[[Request], Message] = reply
        self._request: type[Request] = request
        codec: Codec[Message] = Codec(Message)
        self._listener = Listener(address, secret, codec, limits, refuse=refuse_call)
        self._waker = self._listener.waker()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    @property
    def address(self) -> str:
        """Where ranks attach."""
        return self._listener.address

    def start(self) -> None:
        """Start the thread. If the setup fails before this, call `abandon` instead."""
        self._thread.start()

    def abandon(self) -> None:
        """Close the listener of a server that was never started."""
        self._listener.close()

    def close(self) -> None:
        """End the thread and remove the socket. May be called twice."""
        self._waker.wake()
        self._thread.join()

    def _serve(self) -> None:
        """The thread's work, until it is woken."""
        with self._listener as listener:
            while True:
                try:
                    incoming = listener.receive_or_wake(Deadline.after(_IDLE_S), "a rank to attach")
                except DeadlineExceeded:
                    continue
                if incoming is None:
                    return
                self._answer(listener, incoming)

    def _answer(self, listener: Listener[Message], incoming: Incoming[Message]) -> None:
        """Answer without waiting: a rank that is gone or does not read its messages loses the answer."""
        body = incoming.body
        if isinstance(body, self._request):
            reply = self._reply(body)
        else:
            error = MessageInvalid(f"expected {self._request.__name__} here, not {type(body).__name__}")
            reply = Refusal(fault=fault_of(error, step="attach"))
        with suppress(ChannelClosed, DeadlineExceeded):
            listener.send(incoming.peer, reply, incoming.call, Deadline.after(0.0))


def ask_source(
    offer: Offer, layout: str, secret: Secret, codec: Codec[Message], limits: WireLimits, deadline: Deadline
) -> Attached:
    """Ask the source where the offer's memory lies. Raises MessageInvalid if the layout is not the offered one."""
    with Channel(offer.source, secret, codec, limits, deadline=deadline, waits=False) as channel:
        reply = channel.request(
            Attach(layout=layout, kind=offer.kind),
            deadline,
            f"{offer.source} to say where its memory lies",
        )
    match reply:
        case Attached():
            if reply.layout.fingerprint != offer.layout:
                raise MessageInvalid(f"{offer.source} answered with another layout than {offer.layout}")
            return reply
        case Refusal(fault=fault):
            raise fault.to_error()
        case _:
            raise MessageInvalid(f"{offer.source} answered with {type(reply).__name__}")
