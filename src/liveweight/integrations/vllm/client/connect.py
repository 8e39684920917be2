"""Chooses the controls for a vLLM that a user names by URL, Python object or Ray actor."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from liveweight.errors import Refused
from liveweight.integrations.vllm.client.controls import (
    AsyncControls,
    ClientControls,
    LlmControls,
    VllmControls,
)
from liveweight.integrations.vllm.client.http_controls import HttpControls
from liveweight.integrations.vllm.client.ray_controls import RayControls

REQUIRED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def connect(given: Any, *, key: str | None, loop: asyncio.AbstractEventLoop | None) -> VllmControls:
    """Return the controls of the vLLM that a user named. Refused if the object is no vLLM."""
    given = getattr(given, "base_url", given)  # vLLM's own client of a server
    if isinstance(given, str):
        return HttpControls(given, key)
    missing = [name for name in REQUIRED if not hasattr(given, name)]
    if missing:
        raise Refused(f"{type(given).__name__} is no vLLM: it has no {', '.join(missing)}")
    if type(given).__module__.startswith("ray."):
        return RayControls(given)
    if inspect.iscoroutinefunction(given.start_weight_update):
        if loop is None:
            raise Refused(
                "an AsyncLLM needs the loop that it runs in: vllm(llm, loop=asyncio.get_running_loop())"
            )
        return AsyncControls(given, loop)
    return LlmControls(given) if hasattr(given, "llm_engine") else ClientControls(given)
