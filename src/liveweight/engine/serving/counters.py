"""Counters: a scheduler's limits, and the counts of what it did."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The sizes that bound a scheduler. `width` is how many tokens a drawing row feeds: two with a draft."""

    blocks: int
    block_tokens: int
    context: int
    max_running: int
    max_waiting: int
    batch_tokens: int
    width: int = 1
    caching: bool = True


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """What happened since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def copy(self) -> SchedulerCounts:
        """The counts as they are now."""
        return replace(self, finished=dict(self.finished))

    def plus(self, before: SchedulerCounts) -> SchedulerCounts:
        """The sums of both."""
        finished = {
            reason: self.finished.get(reason, 0) + before.finished.get(reason, 0)
            for reason in self.finished | before.finished
        }
        names = [one.name for one in fields(self) if one.name != "finished"]
        return SchedulerCounts(
            finished=finished, **{name: getattr(self, name) + getattr(before, name) for name in names}
        )
