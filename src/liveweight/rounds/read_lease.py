"""A read lease: one version of a source, kept readable for a requester while its ranks read it. The client of the pull server
(trainer/offers/pull_server).

Owns the connection to the source. While it is open, the source is alive, and waits for a while before it overwrites the version.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Self

from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    MessageInvalid,
    VersionNotOffered,
)
from liveweight.spec.deadline import Deadline
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages import Message
from liveweight.wire.messages.body import Refusal
from liveweight.wire.messages.source import (
    AcquireReadLease,
    ReadLeaseGranted,
    ReadLeaseRefused,
    ReleaseReadLease,
)
from liveweight.wire.waker import Waker

CONNECT_S = 5.0
"""How long to wait for the source to listen."""
RELEASE_S = 2.0
GRACE_S = 2.0
"""A source answers at the deadline of the request; the requester waits so much longer for that answer."""


class ReadLease:
    """Used by one thread. `grant` is the source's answer; leaving the `with` releases the lease."""

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        requester: str,
        version: str | None,
        lease_s: float,
        deadline: Deadline,
        cancel: Waker,
    ) -> None:
        """Acquire the version of that label, or the newest if None. Raises VersionNotOffered with the offered versions, or ChannelClosed if
        no source listens."""
        self._address = address
        self._channel = _connected(address, secret, deadline, cancel)
        self._active = True
        try:
            body = AcquireReadLease(
                requester=requester, version=version, lease_s=lease_s, wait_s=deadline.remaining_s()
            )
            self.grant = self._acquire(body, deadline)
        except BaseException:
            self._channel.close()
            raise

    def check(self) -> None:
        """Raise ChannelClosed if the source is gone. Does not wait; reads and drops the source's notifications."""
        try:
            while self._channel.receive_now() is not None:
                continue
        except ChannelClosed as error:
            raise ChannelClosed(
                f"the source at {self._address} is gone while ranks read {self.grant.version}"
            ) from error

    def release(self, *, read: bool = False) -> None:
        """Tell the source that nobody reads any more, and whether everything was `read`. Ignores a source that is gone. May be called
        twice: the first call counts."""
        if not self._active:
            return
        self._active = False
        with suppress(LiveWeightError):
            self._channel.request(
                ReleaseReadLease(lease=self.grant.lease, read=read),
                Deadline.after(RELEASE_S),
                f"the source at {self._address} to take {self.grant.version} back",
                cancellable=False,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._channel.close()

    def _acquire(self, body: AcquireReadLease, deadline: Deadline) -> ReadLeaseGranted:
        wanted = "its newest version" if body.version is None else body.version
        later = Deadline(deadline.ends_s + GRACE_S, deadline.began_s)
        reply = self._channel.request(body, later, f"the source at {self._address} to hold {wanted}")
        match reply:
            case ReadLeaseGranted():
                return reply
            case ReadLeaseRefused(changing=True):
                raise deadline.exceeded(f"the source at {self._address} to make its next offer")
            case ReadLeaseRefused(offered=offered):
                raise VersionNotOffered(wanted, [str(version.label) for version in offered])
            case Refusal(fault=fault):
                raise fault.to_error()
            case other:
                raise MessageInvalid(f"{self._address} answered with {type(other).__name__}")


def _connected(address: str, secret: Secret, deadline: Deadline, cancel: Waker) -> Channel[Message]:
    try:
        return Channel(address, secret, Codec(Message), deadline=deadline.within(CONNECT_S), cancel=cancel)
    except DeadlineExceeded as error:
        if deadline.over:
            raise
        raise ChannelClosed(f"the source cannot be reached: {error}") from error
