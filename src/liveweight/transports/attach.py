"""Attaching, the part that all transfer modes share: a rank asks a source where the memory of a layout lies.

Owns both ends of that one question: the source's socket with the thread that answers, and a rank's call. What the answer says is the
mode's.
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
from liveweight.wire.messages.values import Offer, fault_of

_IDLE_S = 3600.0


Question = TypeVar("Question", Attach, GetShardLayout)


class AttachServer(Generic[Question]):
    """Answers ranks in a thread of its own, until closed. `reply` is called there, with questions of the kind `asked`."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        limits: WireLimits,
        reply: Callable[[Question], Message],
        *,
        name: str,
        asked: type[Question],
    ) -> None:
        self._reply: Callable[[Question], Message] = reply
        self._asked: type[Question] = asked
        codec: Codec[Message] = Codec(Message)
        self._listener = Listener(address, secret, codec, limits)
        self._waker = self._listener.waker()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    @property
    def address(self) -> str:
        """Where ranks attach."""
        return self._listener.address

    def start(self) -> None:
        """Begin to answer; before this, what cannot be set up closes the listener by `abandon`."""
        self._thread.start()

    def abandon(self) -> None:
        """Close what was never started."""
        self._listener.close()

    def close(self) -> None:
        """End the thread and remove the socket. Twice is fine."""
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
        """Now or not at all: a rank that is gone, or does not read, delays nobody."""
        body = incoming.body
        if isinstance(body, self._asked):
            reply = self._reply(body)
        else:
            error = MessageInvalid(f"it is asked {self._asked.__name__} here, not {type(body).__name__}")
            reply = Refusal(fault=fault_of(error, step="attach"))
        with suppress(ChannelClosed, DeadlineExceeded):
            listener.send(incoming.peer, reply, incoming.call, Deadline.after(0.0))


def ask_source(
    offer: Offer, layout: str, secret: Secret, codec: Codec[Message], limits: WireLimits, deadline: Deadline
) -> Attached:
    """Where the offer's memory lies, as the source says; its layout is the one that was offered."""
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
