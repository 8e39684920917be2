"""The result of the torn demo: counts by side and part, and whether they are as expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from liveweight.lab.torn_demo.judge import TokenCounts

LABEL = "step_2"
"""The new version's label."""
PARTS = ("before", "update", "after_kill", "after_successor")
"""The parts of the demo, by the moment at which a request begins. Without a kill the last two are one: after the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """What one side's clients received. `serving` is the version that the engine itself reports at the end."""

    parts: dict[str, TokenCounts]
    streamed: int
    serving: str

    @property
    def counts(self) -> TokenCounts:
        """The counts of all parts."""
        return sum(self.parts.values(), TokenCounts())

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        parts = {name: counts.to_dict() for name, counts in self.parts.items()}
        return {**self.counts.to_dict(), "streamed": self.streamed, "serving": self.serving, "parts": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class TornResult:
    """Both sides."""

    left: SideResult
    right: SideResult

    @property
    def holds(self) -> bool:
        """Whether the right side never served a mixture, lost no token, and serves the new version to its last requests."""
        last, counts = self.right.parts[PARTS[-1]], self.right.counts
        whole = counts.neither == 0 and counts.total == self.right.streamed
        return whole and last.new == last.total > 0 and self.right.serving == LABEL

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"left": self.left.to_dict(), "right": self.right.to_dict(), "holds": self.holds}
