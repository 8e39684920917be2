"""The calls that a trainer makes to a vLLM: a port, and its implementations for objects of the trainer's own process.

http_controls and ray_controls implement the port for servers and for Ray actors. None of them needs vLLM to be installed where the
trainer runs, unless vLLM runs there. Every call ends by its deadline; an error of vLLM's is raised as a LiveWeightError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal, Protocol, TypeAlias

from liveweight.errors import LiveWeightError, Unavailable
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version

PauseMode: TypeAlias = Literal["keep", "abort", "reuse"]
"""What happens to running requests: they pause and recompute their KV from their tokens; they end; or they go on with the KV they have."""


class VllmControls(Protocol):
    """One vLLM. Called by one thread at a time. `concurrent`: whether vLLM may be called while its user uses it in another thread."""

    @property
    def concurrent(self) -> bool:
        """See above."""

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """Run the handshake on every worker."""

    def start(self, deadline: Deadline) -> None:
        """Begin an update."""

    def begin(self, deadline: Deadline) -> bool:
        """Begin an update. Returns whether somebody has paused vLLM."""

    def start_draft(self, deadline: Deadline) -> bool:
        """Begin an update of the draft model: vLLM hands the model to every worker's backend. False if these controls have no such call."""

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """Call every worker's `update_weights`; returns once all workers have returned."""

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """Let vLLM report that version from its next token on. False if vLLM takes the name only at the end of an update."""

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """End the update. vLLM then reports that version, unless it is None."""

    def paused(self, deadline: Deadline) -> bool:
        """Whether somebody has paused it."""

    def mixes_prefixes(self, deadline: Deadline) -> str | None:
        """Why a request may find cached prefixes of an earlier version if a commit keeps them; None if no request can."""

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop stepping, and drop the KV unless the mode keeps it."""

    def resume(self, deadline: Deadline) -> None:
        """Step again."""


class SequentialControls:
    """Shared by controls that make one call after the other, of a vLLM without our middleware."""

    def mixes_prefixes(self, deadline: Deadline) -> str | None:  # noqa: ARG002 - there is nothing to ask
        """See VllmControls."""
        return "only a server with the middleware keeps them apart"

    def begin(self: VllmControls, deadline: Deadline) -> bool:
        """See VllmControls."""
        was_paused = self.paused(deadline)
        self.start(deadline)
        return was_paused


class _Calls:
    """Runs calls that have no deadline of their own in a second thread, so that the caller can wait with one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="liveweight-vllm")

    def call(self, what: str, work: Callable[[], Any], deadline: Deadline) -> Any:
        return self.result(what, self._threads.submit(work), deadline)

    def result(self, what: str, future: Future[Any], deadline: Deadline) -> Any:
        try:
            return future.result(max(0.0, deadline.remaining_s()))
        except FutureTimeout:
            raise deadline.exceeded(f"{self._name} to {what}") from None
        except LiveWeightError:
            raise
        except Exception as error:  # vLLM's, of any kind
            raise Unavailable(f"{self._name}, {what}: {type(error).__name__}: {error}") from error


class LlmControls(SequentialControls):
    """An `LLM` of this process. An `LLM` runs no request between two calls of `generate`, so there is nothing to pause."""

    concurrent = False
    """Its socket is for one thread at a time: the process aborts if two use it."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._calls = llm, _Calls("the LLM")

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        request = {"init_info": info}
        self._calls.call(
            "run the handshake", lambda: self._llm.init_weight_transfer_engine(request), deadline
        )

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("begin an update", self._llm.start_weight_update, deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        self._calls.call("begin an update of its draft", self._llm.start_draft_weight_update, deadline)
        return True

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("install", lambda: self._llm.update_weights({"update_info": info}), deadline)

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """See VllmControls."""
        self._calls.call("name its version", lambda: self._llm.update_weight_version(str(version)), deadline)
        return True

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("end the update", lambda: self._llm.finish_weight_update(version), deadline)

    def paused(self, deadline: Deadline) -> bool:  # noqa: ARG002 - there is nothing to ask
        """See VllmControls."""
        return False

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:  # noqa: ARG002 - no request runs
        """Drop the cached prefixes."""
        self._calls.call("forget its prefixes", self._llm.reset_prefix_cache, deadline)

    def resume(self, deadline: Deadline) -> None:
        """Nothing to do: an `LLM` was never paused."""


class AsyncControls(SequentialControls):
    """An `AsyncLLM` of this process, whose loop runs in another thread than the publisher's."""

    concurrent = True

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop, self._calls = llm, loop, _Calls("the AsyncLLM")

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=info)
        self._run("run the handshake", self._llm.init_weight_transfer_engine(request), deadline)

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self._run("begin an update", self._llm.start_weight_update(), deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        self._run("begin an update of its draft", self._llm.start_draft_weight_update(), deadline)
        return True

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        self._run("install", self._llm.update_weights(request), deadline)

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """See VllmControls."""
        self._run("name its version", self._llm.update_weight_version(str(version)), deadline)
        return True

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        self._run("end the update", self._llm.finish_weight_update(version), deadline)

    def paused(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        return bool(self._run("say whether it is paused", self._llm.is_paused(), deadline))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See VllmControls."""
        self._run("pause", self._llm.pause_generation(mode=mode, clear_cache=True), deadline)

    def resume(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self._run("resume", self._llm.resume_generation(), deadline)

    def _run(self, what: str, work: Coroutine[Any, Any, Any], deadline: Deadline) -> Any:
        return self._calls.result(what, asyncio.run_coroutine_threadsafe(work, self._loop), deadline)


class ClientControls(SequentialControls):
    """Any object with the four methods of vLLM's weight sync clients. Pausing is not among them: the user pauses vLLM around `publish`, or
    adds `pause_generation(mode)`, `resume_generation()` and `update_weight_version(version)` to the object. A draft model is updated only
    if the object has `start_draft_weight_update()`. Unless the object's `concurrent` is true, an `LLM` may be behind it."""

    def __init__(self, client: Any) -> None:
        self._client, self._calls = client, _Calls("the client")
        self.concurrent = bool(getattr(client, "concurrent", False))

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call(
            "run the handshake", lambda: self._client.init_weight_transfer_engine(info), deadline
        )

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("begin an update", self._client.start_weight_update, deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        start = getattr(self._client, "start_draft_weight_update", None)
        if start is not None:
            self._calls.call("begin an update of its draft", start, deadline)
        return start is not None

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("install", lambda: self._client.update_weights(info), deadline)

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """See VllmControls."""
        name = getattr(self._client, "update_weight_version", None)
        if name is not None:
            self._calls.call("name its version", lambda: name(str(version)), deadline)
        return name is not None

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        self._calls.call("end the update", lambda: self._client.finish_weight_update(version), deadline)

    def paused(self, deadline: Deadline) -> bool:  # noqa: ARG002 - the client has no such call
        """See VllmControls."""
        return False

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See VllmControls."""
        if (pause := getattr(self._client, "pause_generation", None)) is not None:
            self._calls.call("pause", lambda: pause(mode), deadline)

    def resume(self, deadline: Deadline) -> None:
        """See VllmControls."""
        if (resume := getattr(self._client, "resume_generation", None)) is not None:
            self._calls.call("resume", resume, deadline)
