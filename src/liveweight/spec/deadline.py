"""Deadlines: the one way to say how long a wait may take.

A Deadline is a moment of this process's monotonic clock. It never crosses a process: in a message a wait is a duration,
and the process that waits longest starts its clock first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from liveweight.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a wait ends, and when it began."""

    ends_s: float
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """A deadline that many seconds from now."""
        now = time.monotonic()
        return cls(now + seconds, now)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.ends_s - time.monotonic())

    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.began_s

    @property
    def over(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.ends_s

    def within(self, seconds: float) -> Deadline:
        """The sooner of this deadline and that many seconds from now."""
        now = time.monotonic()
        return Deadline(min(self.ends_s, now + seconds), now)

    def exceeded(self, waiting_for: str) -> DeadlineExceeded:
        """The error to raise when the wait for that ended without an answer."""
        return DeadlineExceeded(waiting_for, self.waited_s())

    def check(self, waiting_for: str) -> None:
        """Raise if the moment has passed."""
        if self.over:
            raise self.exceeded(waiting_for)
