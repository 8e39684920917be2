"""Opens a round with the leader of the vLLM that the trainer's calls reach, and with no other.

Staging begins at once. The check that the leader is vLLM's own runs meanwhile; its result is known before a vote, and before a version
counts as installed already.
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
"""How long an abandoned leader may take to abort a round."""


class RoundOpening:
    """Opens the rounds of one vLLM. Called by the replica's thread."""

    def __init__(self, name: str, handshake: VllmHandshake, wire: WireReplica) -> None:
        self._name, self._handshake, self._wire = name, handshake, wire
        self._checking: Future[bool] | None = None

    def open(self, body: m.Open, deadline: Deadline) -> m.Opened:
        """Open a round. If the leader outlived its vLLM, open the round with its successor instead. If vLLM does not answer the check soon,
        one of its workers hangs, and the round will name it."""
        self._checking = None
        if self._handshake.join_workers(deadline):
            return self._wire.open(body, deadline)
        self._checking = self._handshake.start_check(deadline)
        opened: m.Opened | None = None
        refused: ReplicaRefused | None = None
        try:
            opened = self._wire.open(body, deadline)
        except ReplicaRefused as error:
            refused = error
        except ChannelClosed:  # the leader outlived its vLLM, and exits now
            opened = None
        try:
            own = self._soon_own(opened, deadline)
        except LiveWeightError:
            self._drop(opened, deadline)
            self._handshake.finish_check(deadline)
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
        """Abort a round that nobody else knows of."""
        if opened is not None and opened.round is not None:
            with suppress(LiveWeightError, ReplicaRefused):
                self._wire.abort(opened.round, f"{self._name} is not there", deadline.within(ABORT_S))

    def _open_with_its_successor(self, left: m.Opened | None, body: m.Open, deadline: Deadline) -> m.Opened:
        self._drop(left, deadline)
        self._checking, self._handshake.in_doubt = None, True
        self._handshake.join_workers(deadline)
        return self._wire.open(body, deadline)

    def check_own(self, deadline: Deadline) -> None:
        """Called before a vote. ReplicaRefused if workers of another vLLM have staged."""
        if not self._own(deadline):
            self._handshake.in_doubt = True
            gone = ChannelClosed(f"{self._name} was started again; others than its workers have staged")
            raise ReplicaRefused(fault_of(gone, step="vote"))

    def _own(self, deadline: Deadline) -> bool:
        return self._checking is None or self._handshake.own(self._checking, deadline)
