"""The states of an engine, as values: running, paused, asleep, saving, recovered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from liveweight.engine.serving.counters import SchedulerCounts
from liveweight.errors import LiveWeightError
from liveweight.spec.manifest import Version

State: TypeAlias = Literal["running", "asleep", "torn", "pending_weights", "stopping", "failed", "stopped"]
"""`asleep`: memory was released; `torn`: an update in place failed, and no weights may serve; `pending_weights`: a rank was lost, and the
replacement ranks do not hold the version yet, or the engine waits for a publisher."""
PENDING = "pending weights"
"""How an engine's update status begins while its ranks are being started again."""
Pausing: TypeAlias = Literal["running", "draining", "paused"]
PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
"""What a pause does to requests that run: they stop and go on later; they finish first; they end with what they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The engine at one moment."""

    state: State
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    fault: LiveWeightError | None
    weights: str
    paused: Pausing = "running"
    asleep: tuple[str, ...] = ()
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingStatus:
    """An engine's snapshots. `newest` is the last that this process wrote or found complete, `writing` the version being written;
    `failed` says why the last attempt failed."""

    directory: str
    every: int
    keep: int
    newest: Version | None = None
    path: str | None = None
    writing: Version | None = None
    failed: str | None = None


Origin: TypeAlias = Literal["snapshot", "offer", "publisher", "checkpoint"]
"""Where a replica that lost a rank got its weights: `publisher`, a round that came before its own; `checkpoint`, its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStatus:
    """How an engine came back the last time. `behind` is the version that it had, where that is not the one it came back with;
    `notes` say what was tried before, and why that was not taken."""

    restarts: int
    version: Version
    origin: Origin
    behind: Version | None
    notes: tuple[str, ...]
    took_s: float
