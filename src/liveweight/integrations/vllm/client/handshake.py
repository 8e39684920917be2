"""The trainer's handshake with vLLM's workers, which proves that the leader on our wire is theirs.

vLLM's calls and our wire must reach the same workers. A worker can outlive its server (vLLM's engine does if the server is killed), and
goes on answering on our wire while another vLLM serves at the server's address. So every handshake has a session id of its own: vLLM's
calls carry it to the workers, and their leader reports it on our wire.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from liveweight.errors import RoundAborted, Unavailable
from liveweight.integrations.vllm.client.controls import VllmControls
from liveweight.integrations.vllm.client.update_calls import UpdateCalls
from liveweight.integrations.vllm.draft_model import GROUP
from liveweight.rounds.replica import WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import OptionalGroup, Version

POLL_S = 0.2
"""How often a wait checks whether the publisher is being closed."""


class VllmHandshake:
    """The handshake with one vLLM. Called by the replica's thread; calls to vLLM run in `thread`, one after the other."""

    def __init__(
        self,
        name: str,
        controls: VllmControls,
        updates: UpdateCalls,
        thread: ThreadPoolExecutor,
        wire: WireReplica,
        state_wire: WireReplica,
        terms: dict[str, Any],
    ) -> None:
        """`terms` are sent to every worker, see HandshakeTerms; the session is added. `wire` carries rounds, `state_wire` reads the state
        while a call on `wire` waits."""
        self._name, self._controls, self._updates, self._terms = name, controls, updates, terms
        self._wire, self._state_wire, self._thread = wire, state_wire, thread
        self._checking: Future[bool] | None = None
        self.interrupted = threading.Event()
        """Set when the publisher is being closed, by any thread."""
        self.in_doubt = False
        """Whether the outcome of a swap is unknown."""
        self.drafts = True
        """False if vLLM has a draft model and no call that hands it to the workers."""

    def settle(self, deadline: Deadline) -> None:
        """Wait until no update of vLLM is active. If vLLM did not let the update end, its outcome is in doubt."""
        self.in_doubt = not self._updates.over(deadline) or self.in_doubt

    def ensure_own_leader(self, deadline: Deadline) -> None:
        """Make sure that the leader on our wire is vLLM's own."""
        if not self.join_workers(deadline) and not self.own(self.start_check(deadline), deadline):
            self.in_doubt = True
            self.join_workers(deadline)

    def join_workers(self, deadline: Deadline) -> bool:
        """Let vLLM's workers join if they have not: at first, after a restart, and if a swap is in doubt. Returns whether that was
        necessary. If not, `own` says whether the leader is vLLM's own."""
        self.settle(deadline)
        if self._wire.connected and not self.in_doubt:
            return False
        self._wire.disconnect()
        self._state_wire.disconnect()
        if not self.own(self.start_check(deadline), deadline):
            raise Unavailable(f"the leader at {self._terms['address']} is not one of {self._name}'s workers")
        replica_state = self._wire.replica_state(deadline)
        if replica_state.round is None:
            self._end_abandoned_update(replica_state.serving, deadline)
            self._hand_over_draft(replica_state.optional, deadline)
        self.in_doubt = False
        return True

    def start_check(self, deadline: Deadline) -> Future[bool]:
        """Begin to check whether the leader is vLLM's own. Does not wait."""
        self._checking = self._thread.submit(self._check, deadline)
        return self._checking

    def own(self, check: Future[bool], deadline: Deadline) -> bool:
        """The result of that check. DeadlineExceeded, or RoundAborted if the publisher is being closed, which also cancels the check."""
        while True:
            try:
                return check.result(min(POLL_S, max(0.0, deadline.remaining_s())))
            except FutureTimeout:
                if self.interrupted.is_set():
                    check.cancel()
                    raise RoundAborted("the publisher was closed") from None
                deadline.check(f"{self._name} to finish the handshake")

    def finish_check(self, deadline: Deadline) -> None:
        """Wait for a check that is still running, if vLLM's user must not use vLLM at the same time."""
        if self._checking is not None and not self._controls.concurrent and not self._checking.cancel():
            wait([self._checking], max(0.0, deadline.remaining_s()))

    def _check(self, deadline: Deadline) -> bool:
        """Send vLLM's workers a new session id, and see whether the leader reports it."""
        session = secrets.token_hex(8)
        timeout_s = max(1.0, deadline.remaining_s())
        self._controls.init({**self._terms, "session": session, "timeout_s": timeout_s}, deadline)
        return session in self._state_wire.replica_state(deadline).met

    def _end_abandoned_update(self, serving: Version | None, deadline: Deadline) -> None:
        """End an update that is active without a round: its trainer died, and vLLM is paused for it. All workers hold one version, since
        others refuse the handshake. vLLM may not know that version's name yet."""
        try:
            self._controls.start(deadline)
            self._controls.finish(None, deadline)
        except Unavailable:
            self._controls.finish(None if serving is None else str(serving), deadline)
            self._controls.resume(deadline)

    def _hand_over_draft(self, optional: Iterable[OptionalGroup], deadline: Deadline) -> None:
        """If the workers expect the draft model's tensors, have vLLM hand them the model, by an update of it that installs nothing."""
        if any(group.name == GROUP for group in optional):
            self.drafts = self._controls.start_draft(deadline)
            if self.drafts:
                self._controls.finish(None, deadline)
