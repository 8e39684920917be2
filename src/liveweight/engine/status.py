"""How an engine is: values for those who ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from liveweight.engine.account import Counts
from liveweight.errors import LiveWeightError

State: TypeAlias = Literal["running", "stopping", "failed", "stopped"]
Pausing: TypeAlias = Literal["running", "draining", "paused"]
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
"""What a pause does to requests that run: they stand still and go on later; they finish first; they end with what they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the engine is, at one moment."""

    state: State
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    fault: LiveWeightError | None
    weights: str
    paused: Pausing = "running"
    counts: Counts = field(default_factory=Counts)
