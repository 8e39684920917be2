"""The port to one replica, which the coordinator uses, and its implementation for a leader on our wire.

Each method takes the round's deadline, names in its error what it waited for, and raises the replica's refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from liveweight.errors import ChannelClosed, LiveWeightError, MessageInvalid, RoundAborted
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.wire import messages as m
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.messages.values import Fault, RoundId
from liveweight.wire.waker import Waker

Answer = TypeVar("Answer", bound=m.Message)


class ReplicaRefused(Exception):
    """A replica's refusal with all its facts: which rank, in which step, after how long."""

    def __init__(self, fault: Fault, serving: Version | None = None) -> None:
        super().__init__(fault.message)
        self.fault, self.serving = fault, serving

    def to_error(self) -> LiveWeightError:
        """The error that the replica refused with."""
        return self.fault.to_error()


class Replica(Protocol):
    """One engine. Called by one thread at a time (`interrupt`: by any). Raises ReplicaRefused, or a LiveWeightError if the replica cannot
    be reached."""

    @property
    def name(self) -> str:
        """The replica's name in reports and errors."""

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        """The tensors it expects and the version it serves; waits until all its ranks have joined."""

    def describe(self, body: m.Describe, deadline: Deadline) -> None:
        """Compare manifests, in both directions, and kept tensors with what is live; let rounds name this manifest by `structure`."""

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """Begin a round."""

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """Wait until the round has come that far, or failed, or the deadline is over."""

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        """Send the digests of a round that was opened without them; `status` says how the comparison ended."""

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """Request a yes vote; a no is raised."""

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """Make the version visible on all its ranks, or on none."""

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        """Abort the round. Returns the ranks that may still be reading the source."""

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        """Tell the replica that the others serve `version`: it takes no requests until a round has updated it. There is no answer."""

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        """Go back to the version before."""

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        """Digest what its ranks hold now, and compare; rounds and requests go on meanwhile."""

    def interrupt(self) -> None:
        """The publisher is being closed: the present call and every later one but `abort` end at once, with RoundAborted."""

    def close(self) -> None:
        """Let go of the connection."""


class WireReplica:
    """A replica whose leader listens on our wire (a Receiver's rank 0). Reconnects after the leader was replaced.

    `locate` returns the leader's address whenever a connection is made, for a leader whose address changes when it is started again; `name`
    then names the replica whatever its address.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        name: str | None = None,
        locate: Callable[[Deadline], str] | None = None,
    ) -> None:
        self._address, self._secret = address, secret
        self._name, self._locate = name, locate
        self._interrupt = Waker()
        self._channel: Channel[m.Message] | None = None

    @property
    def name(self) -> str:
        """Its name, or its address."""
        return self._address if self._name is None else self._name

    @property
    def address(self) -> str:
        """The leader's address at the last connection; empty if it was never located."""
        return self._address

    @property
    def connected(self) -> bool:
        """Whether its leader has been reached, and has not ended since."""
        self._drop_ended_channel()
        return self._channel is not None

    def replica_state(self, deadline: Deadline) -> m.ReplicaState:
        """See Replica."""
        self._drop_ended_channel()
        return self._request(
            m.GetReplicaState(wait_s=deadline.remaining_s()), m.ReplicaState, deadline, "say what it expects"
        )

    def describe(self, body: m.Describe, deadline: Deadline) -> None:
        """See Replica."""
        body = msgspec.structs.replace(body, timeout_s=deadline.remaining_s())
        self._request(body, m.Described, _with_grace(deadline), "compare manifests")

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """See Replica."""
        self._drop_ended_channel()
        return self._request(body, m.Opened, deadline, "open the round")

    def status(self, round_id: RoundId, until: m.Phase, deadline: Deadline) -> m.Progress:
        """See Replica. The answer is due at the deadline; the wait for it lasts a little longer."""
        body = m.WaitFor(round=round_id, until=until, wait_s=deadline.remaining_s())
        return self._request(body, m.Progress, _with_grace(deadline), f"be {until}")

    def compare(self, round_id: RoundId, digests: bytes, deadline: Deadline) -> None:
        """See Replica."""
        self._request(m.Compare(round=round_id, digests=digests), m.Compared, deadline, "compare digests")

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        """See Replica."""
        self._request(m.RequestVote(round=round_id, lease_s=lease_s), m.Vote, deadline, "vote")

    def commit(self, round_id: RoundId, deadline: Deadline) -> m.Committed:
        """See Replica."""
        body = m.Commit(round=round_id, timeout_s=deadline.remaining_s())
        return self._request(body, m.Committed, _with_grace(deadline), "commit")

    def abort(self, round_id: RoundId, reason: str, deadline: Deadline) -> tuple[int, ...]:
        """See Replica. If only the connection was lost, the abort goes over a new one; a successor of the leader refuses it, because it
        does not know the round."""
        body = m.Abort(round=round_id, reason=reason, wait_s=deadline.remaining_s())
        later = _with_grace(deadline)
        if self._channel is None:
            self._channel = self._connect(later, waits=False)
        return self._request(body, m.Aborted, later, "abort", interruptible=False).readers

    def mark_behind(self, version: Version, reason: str, deadline: Deadline) -> None:
        """See Replica. Does not reconnect."""
        if self._channel is not None:
            self._channel.send(m.MarkBehind(version=version, reason=reason), deadline)

    def undo(self, publisher: str, deadline: Deadline) -> m.Committed:
        """See Replica."""
        body = m.Undo(publisher=publisher, timeout_s=deadline.remaining_s())
        return self._request(body, m.Committed, _with_grace(deadline), "undo")

    def verify(self, body: m.Verify, deadline: Deadline) -> m.Verdict:
        """See Replica."""
        self._drop_ended_channel()
        return self._request(body, m.Verdict, _with_grace(deadline), "say what it holds")

    def note_sleep(self, body: m.Sleep | m.Wake, deadline: Deadline) -> None:
        """Tell the leader that its engine gives memory back, or has restored it. For the engine's own process."""
        self._request(body, m.SleepNoted, deadline, "note that it sleeps or wakes up")

    def interrupt(self) -> None:
        """See Replica."""
        self._interrupt.wake()

    def close(self) -> None:
        """See Replica."""
        self.disconnect()
        self._interrupt.close()

    def _request(
        self,
        body: m.Message,
        kind: type[Answer],
        deadline: Deadline,
        step: str,
        *,
        interruptible: bool = True,
    ) -> Answer:
        try:
            answer = self._connected(deadline).request(
                body, deadline, f"{self.name} to {step}", cancellable=interruptible
            )
        except ChannelClosed as error:
            if interruptible and self._interrupt.woken:
                raise RoundAborted(f"the publisher was closed: {error}") from error
            self.disconnect()
            raise
        if isinstance(answer, m.Refusal):
            raise ReplicaRefused(answer.fault, answer.serving)
        if not isinstance(answer, kind):
            raise MessageInvalid(f"{self.name} answered {type(body).__name__} with {type(answer).__name__}")
        return answer

    def _drop_ended_channel(self) -> None:
        """Before a round: drop a channel whose leader has ended, so that the next request connects to its successor."""
        if self._channel is None:
            return
        try:
            self._channel.receive_now()
        except ChannelClosed:
            self.disconnect()

    def _connected(self, deadline: Deadline) -> Channel[m.Message]:
        if self._channel is None:
            if self._locate is not None:
                self._address = self._locate(deadline)
            self._channel = self._connect(deadline)
        return self._channel

    def _connect(self, deadline: Deadline, *, waits: bool = True) -> Channel[m.Message]:
        return Channel(
            self._address,
            self._secret,
            Codec(m.Message),
            deadline=deadline,
            cancel=self._interrupt,
            waits=waits,
        )

    def disconnect(self) -> None:
        """Let go of the connection; the next call makes another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _with_grace(deadline: Deadline) -> Deadline:
    """A replica answers at the deadline of the request; the requester waits so much longer for that answer."""
    return Deadline(deadline.ends_s + GRACE_S, deadline.began_s)


GRACE_S = 2.0
