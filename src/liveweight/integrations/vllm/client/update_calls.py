"""vLLM's own updates around our commits: begun ahead of them, ended behind them, since vLLM answers only at the end of a step. One that
cannot be told anything while its user uses it has ended when its user has it back.

Owns what was asked and not answered yet. Whether vLLM may be paused, and who resumes it, is replica's.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

from liveweight.integrations.vllm.client.controls import VllmControls
from liveweight.spec.deadline import Deadline


class UpdateCalls:
    """Of one vLLM. Called by the replica's thread; `thread` is where vLLM is asked meanwhile."""

    def __init__(self, name: str, controls: VllmControls, thread: ThreadPoolExecutor) -> None:
        self._name, self._controls, self._thread = name, controls, thread
        self._beginning: Future[bool] | None = None
        self._ending: Future[None] | None = None

    def begin_ahead(self, deadline: Deadline) -> None:
        """Begin one, unless that is under way; nobody waits for it here."""
        if self._beginning is None:
            self._beginning = self._thread.submit(self._controls.begin, deadline)

    def begin(self, deadline: Deadline) -> bool:
        """One is active when it returns; whether somebody had paused vLLM. Raises what vLLM has against it."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return self._controls.begin(deadline)
        try:
            return beginning.result(max(0.0, deadline.remaining_s()))
        except FutureTimeout:
            raise deadline.exceeded(f"{self._name} to begin an update") from None

    def end(self, label: str | None, deadline: Deadline) -> None:
        """End the one that is active; that is waited for only where it must be. vLLM says then that it serves that version, unless it is
        None."""
        self._end_by(self._thread.submit(self._controls.finish, label, deadline), deadline)

    def _end_by(self, ending: Future[None], deadline: Deadline) -> None:
        self._ending = ending
        if not self._controls.concurrent:
            wait([ending], max(0.0, deadline.remaining_s()))  # how it went, `over` says

    def over(self, deadline: Deadline) -> bool:
        """Wait until none is active any more, also of what was begun ahead and came to nothing. False where vLLM did not let it end."""
        self.give_up(deadline)
        if self._ending is None:
            return True
        try:
            ended = self._ending.exception(max(0.0, deadline.remaining_s())) is None
        except FutureTimeout:
            raise deadline.exceeded(f"{self._name} to end the update before") from None
        self._ending = None
        return ended

    def give_up(self, deadline: Deadline) -> None:
        """End what was begun ahead, without waiting for that unless it must be."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            self._end_by(self._thread.submit(self._end_begun, beginning, deadline), deadline)

    def _end_begun(self, beginning: Future[bool], deadline: Deadline) -> None:
        """In the thread that vLLM is asked in, after what it began there: nothing is waited for."""
        beginning.result()
        self._controls.finish(None, deadline)
