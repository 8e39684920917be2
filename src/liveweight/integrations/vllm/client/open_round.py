"""How a round is opened with the leader of the vLLM that the trainer's calls reach, and with no other.

Staging begins at once; whether the leader is vLLM's own is found out beside it, and is known before a vote, and before a version is said to
be installed already.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from liveweight.errors import ChannelClosed, DeadlineExceeded, LiveWeightError
from liveweight.integrations.vllm.client.handshake import VllmHandshake
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.wire import messages as m
from liveweight.wire.messages.values import fault_of

ABORT_S = 2.0
"""How long a leader that nobody wants any more may take to give a round up."""


class RoundOpening:
    """Of one vLLM. Called by the replica's thread."""

    def __init__(self, name: str, meeting: VllmHandshake, wire: WireReplica) -> None:
        self._name, self._meeting, self._wire = name, meeting, wire
        self._asked: Future[bool] | None = None

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """Open a round. A leader that outlived its vLLM is left, and its successor met. A vLLM that does not say so soon has a worker that
        stands still, which the round will name."""
        self._asked = None
        if self._meeting.meet(deadline):
            return self._wire.open(body, deadline)
        self._asked = self._meeting.ask(deadline)
        opened: m.Opened | None = None
        refused: ReplicaRefused | None = None
        try:
            opened = self._wire.open(body, deadline)
        except ReplicaRefused as error:
            refused = error
        except ChannelClosed:  # an outlived one, at its end
            opened = None
        try:
            own = self._soon_own(opened, deadline)
        except LiveWeightError:
            self._drop(opened, deadline)
            self._meeting.rest(deadline)
            raise
        if own:
            if opened is not None:
                return opened
            if refused is not None:
                raise refused
        return self._open_with_its_successor(opened, body, deadline)

    def _soon_own(self, opened: m.Opened | None, deadline: Deadline) -> bool:
        began = opened is not None and opened.round is not None
        try:
            return self._own(deadline.within(deadline.remaining_s() / 4) if began else deadline)
        except DeadlineExceeded:
            if not began:
                raise
            return True

    def _drop(self, opened: m.Opened | None, deadline: Deadline) -> None:
        """Give a round up that nobody hears of."""
        if opened is not None and opened.round is not None:
            with suppress(LiveWeightError, ReplicaRefused):
                self._wire.abort(opened.round, f"{self._name} is not there", deadline.within(ABORT_S))

    def _open_with_its_successor(self, left: m.Opened | None, body: m.Open, deadline: Deadline) -> m.Opened:
        self._drop(left, deadline)
        self._asked, self._meeting.in_doubt = None, True
        self._meeting.meet(deadline)
        return self._wire.open(body, deadline)

    def check_own(self, deadline: Deadline) -> None:
        """Before a vote: ReplicaRefused where other workers than vLLM's have staged."""
        if not self._own(deadline):
            self._meeting.in_doubt = True
            gone = ChannelClosed(f"{self._name} was started again; others than its workers have staged")
            raise ReplicaRefused(fault_of(gone, step="vote"))

    def _own(self, deadline: Deadline) -> bool:
        return self._asked is None or self._meeting.own(self._asked, deadline)
