"""vLLM's own updates around our commits. They begin before a commit and end after it, in a second thread, since vLLM answers only at the
end of a step. If vLLM cannot be called while its user uses it, the update has ended before the user gets vLLM back.

Owns the calls that have not been answered yet. Whether vLLM may be paused, and who resumes it, is decided in client/replica.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

from liveweight.integrations.vllm.client.controls import VllmControls
from liveweight.spec.deadline import Deadline


class UpdateCalls:
    """The updates of one vLLM. Called by the replica's thread; calls to vLLM run in `thread`."""

    def __init__(self, name: str, controls: VllmControls, thread: ThreadPoolExecutor) -> None:
        self._name, self._controls, self._thread = name, controls, thread
        self._beginning: Future[bool] | None = None
        self._ending: Future[None] | None = None

    def begin_ahead(self, deadline: Deadline) -> None:
        """Begin an update, unless one is beginning already. Does not wait."""
        if self._beginning is None:
            self._beginning = self._thread.submit(self._controls.begin, deadline)

    def begin(self, deadline: Deadline) -> bool:
        """Wait until an update is active. Returns whether somebody had paused vLLM. Raises vLLM's error."""
        beginning, self._beginning = self._beginning, None
        if beginning is None:
            return self._controls.begin(deadline)
        try:
            return beginning.result(max(0.0, deadline.remaining_s()))
        except FutureTimeout:
            raise deadline.exceeded(f"{self._name} to begin an update") from None

    def end(self, label: str | None, deadline: Deadline) -> None:
        """End the active update; vLLM then reports that version, unless it is None. Waits only if vLLM's controls are not concurrent."""
        self._end_by(self._thread.submit(self._controls.finish, label, deadline), deadline)

    def _end_by(self, ending: Future[None], deadline: Deadline) -> None:
        self._ending = ending
        if not self._controls.concurrent:
            wait([ending], max(0.0, deadline.remaining_s()))  # `over` returns the outcome

    def over(self, deadline: Deadline) -> bool:
        """Wait until no update is active, including one that was begun ahead and not used. False if vLLM did not let the update end."""
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
        """End an update that was begun ahead. Waits only if vLLM's controls are not concurrent."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            self._end_by(self._thread.submit(self._end_begun, beginning, deadline), deadline)

    def _end_begun(self, beginning: Future[bool], deadline: Deadline) -> None:
        """Runs in the same thread as the call that began the update, and after it: `result()` does not wait."""
        beginning.result()
        self._controls.finish(None, deadline)
