"""How a trainer meets vLLM's workers, and knows that the leader which it reaches is theirs.

What goes through vLLM's calls and what goes over our wire must be about the same workers. A worker can outlive its server (vLLM's engine
does where the server is killed), and goes on answering on our wire while another vLLM serves at the server's address. So every meeting
has a word of its own, which vLLM's calls carry to its workers, and which their leader says.
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

LOOK_S = 0.2
"""How often a wait looks whether the publisher is being closed."""


class VllmHandshake:
    """Of one vLLM. Called by the replica's thread; `thread` is where vLLM is told, one thing after the other."""

    def __init__(
        self,
        name: str,
        controls: VllmControls,
        updates: UpdateCalls,
        thread: ThreadPoolExecutor,
        wire: WireReplica,
        looker: WireReplica,
        terms: dict[str, Any],
    ) -> None:
        """`terms`: what every worker is told, see terms.Terms; the session is added."""
        self._name, self._controls, self._updates, self._terms = name, controls, updates, terms
        self._wire, self._looker, self._thread = wire, looker, thread
        self._asked: Future[bool] | None = None
        self.interrupted = threading.Event()
        """Set when the publisher is being closed, by any thread."""
        self.in_doubt = False
        """Whether a swap was left without a known end."""
        self.drafts = True
        """Whether vLLM could be told to hand its draft model to its workers, if it has one."""

    def settle(self, deadline: Deadline) -> None:
        """Wait until no update of vLLM is active any more; where it was not let end, that is a doubt."""
        self.in_doubt = not self._updates.over(deadline) or self.in_doubt

    def make_sure(self, deadline: Deadline) -> None:
        """The leader on our wire is vLLM's own on return."""
        if not self.meet(deadline) and not self.own(self.ask(deadline), deadline):
            self.in_doubt = True
            self.meet(deadline)

    def meet(self, deadline: Deadline) -> bool:
        """Let vLLM's workers join, unless they have: at first, after a restart, and where a swap was left in doubt. Whether that was
        done; else, whether the leader is vLLM's own, `own` says."""
        self.settle(deadline)
        if self._wire.connected and not self.in_doubt:
            return False
        self._wire.disconnect()
        self._looker.disconnect()
        if not self.own(self.ask(deadline), deadline):
            raise Unavailable(f"at {self._terms['address']} others listen than the workers of {self._name}")
        replica_state = self._wire.replica_state(deadline)
        if replica_state.round is None:
            self._end_what_was_left(replica_state.serving, deadline)
            self._hand_over_draft(replica_state.optional, deadline)
        self.in_doubt = False
        return True

    def ask(self, deadline: Deadline) -> Future[bool]:
        """Find out whether the leader is vLLM's own; nobody waits for it here."""
        self._asked = self._thread.submit(self._ask, deadline)
        return self._asked

    def own(self, asked: Future[bool], deadline: Deadline) -> bool:
        """What was found out. DeadlineExceeded, or RoundAborted where the publisher is being closed; then it is not asked any more."""
        while True:
            try:
                return asked.result(min(LOOK_S, max(0.0, deadline.remaining_s())))
            except FutureTimeout:
                if self.interrupted.is_set():
                    asked.cancel()
                    raise RoundAborted("the publisher was closed") from None
                deadline.check(f"{self._name} to meet us")

    def rest(self, deadline: Deadline) -> None:
        """Nothing is being asked any more on return, where vLLM's user must not use it beside that."""
        if self._asked is not None and not self._controls.concurrent and not self._asked.cancel():
            wait([self._asked], max(0.0, deadline.remaining_s()))

    def _ask(self, deadline: Deadline) -> bool:
        """Tell vLLM's workers that they are met, and ask the leader whether it heard that."""
        session = secrets.token_hex(8)
        timeout_s = max(1.0, deadline.remaining_s())
        self._controls.init({**self._terms, "session": session, "timeout_s": timeout_s}, deadline)
        return session in self._looker.replica_state(deadline).met

    def _end_what_was_left(self, serving: Version | None, deadline: Deadline) -> None:
        """An update that is active without a round is one that a trainer did not live to end, and vLLM is paused for it. All workers
        hold one version: those that do not refuse to be met. vLLM may not have been told its name."""
        try:
            self._controls.start(deadline)
            self._controls.finish(None, deadline)
        except Unavailable:
            self._controls.finish(None if serving is None else str(serving), deadline)
            self._controls.resume(deadline)

    def _hand_over_draft(self, optional: Iterable[OptionalGroup], deadline: Deadline) -> None:
        """Let vLLM's workers have their draft model, where they expect its tensors: by an update of it that installs nothing."""
        if any(group.name == GROUP for group in optional):
            self.drafts = self._controls.start_draft(deadline)
            if self.drafts:
                self._controls.finish(None, deadline)
