"""The engine as HTTP sees it: a small port, so that its contract can be tested without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Status
from liveweight.engine.models.spec import ModelSpec
from liveweight.engine.requests import Sampling, Sink
from liveweight.engine.text import Tokenizer
from liveweight.errors import LiveWeightError


class Engine(Protocol):
    """One replica. Every method may be called from any thread, and but for `stop` none waits for a step."""

    config: EngineConfig
    spec: ModelSpec
    name: str
    context: int
    vocab: int
    tokenizer: Tokenizer

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """Take a request; its number. RequestInvalid, QueueFull, EngineStopping or RankLost if it is not taken."""

    def cancel(self, request: int) -> None:
        """End a request, if it has not ended; its sink hears a last piece with `abort`."""

    def status(self) -> Status:
        """How it is now."""

    def on_failure(self, callback: Callable[[LiveWeightError], None]) -> None:
        """Call back once when a rank is lost, on any thread; at once, if one was."""

    def stop(self, timeout_s: float = 0.0) -> None:
        """Take no more, let what runs end for so long, abort the rest, end every process. Waits for it; twice is fine."""
