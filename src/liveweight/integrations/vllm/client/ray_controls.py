"""A vLLM that is a Ray actor: implements VllmControls (client/controls) over the actor's handle.

The actor is an `LLM` or an `AsyncLLM`, or has their methods. vLLM need not be installed where the trainer runs. Ray is: the handle is an
object of Ray's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from liveweight.errors import ChannelClosed, Unavailable
from liveweight.integrations.vllm.client.controls import PauseMode, SequentialControls
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version


class RayControls(SequentialControls):
    """One actor. An `LLM` is called between two calls of its `generate`: there is nothing to pause, only cached prefixes to drop."""

    concurrent = True

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def init(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        # The fields of vLLM's own request that the actor reads.
        self._call("init_weight_transfer_engine", deadline, SimpleNamespace(init_info=info))

    def start(self, deadline: Deadline) -> None:
        """See VllmControls."""
        self._call("start_weight_update", deadline)

    def start_draft(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        if not hasattr(self._handle, "start_draft_weight_update"):
            return False
        self._call("start_draft_weight_update", deadline)
        return True

    def update(self, info: dict[str, Any], deadline: Deadline) -> None:
        """See VllmControls."""
        self._call("update_weights", deadline, SimpleNamespace(update_info=info))

    def name_version(self, version: Version, deadline: Deadline) -> bool:
        """See VllmControls."""
        self._call("update_weight_version", deadline, str(version))
        return True

    def finish(self, version: str | None, deadline: Deadline) -> None:
        """See VllmControls."""
        self._call("finish_weight_update", deadline, version)

    def paused(self, deadline: Deadline) -> bool:
        """See VllmControls."""
        return hasattr(self._handle, "is_paused") and bool(self._call("is_paused", deadline))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See VllmControls."""
        if hasattr(self._handle, "pause_generation"):
            self._call("pause_generation", deadline, mode=mode, clear_cache=True)
        else:
            self._call("reset_prefix_cache", deadline)

    def resume(self, deadline: Deadline) -> None:
        """See VllmControls."""
        if hasattr(self._handle, "resume_generation"):
            self._call("resume_generation", deadline)

    def _call(self, method: str, deadline: Deadline, *arguments: object, **named: object) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        try:
            answer = getattr(self._handle, method).remote(*arguments, **named)
            return ray.get(answer, timeout=max(0.0, deadline.remaining_s()))
        except GetTimeoutError:
            raise deadline.exceeded(f"the actor of Ray to answer {method}") from None
        except RayActorError as error:
            raise ChannelClosed(f"the actor of Ray is gone: {error}") from error
        except RayError as error:  # what the method raised
            raise Unavailable(f"the actor of Ray, {method}: {error}") from error
