"""The staleness bound: how far generation may run ahead of training, and which samples are too old to learn from.

Pure. Before a batch is asked for, it is counted which step will use it; if the engines would still serve weights that are too old for
that step, the question waits. The oldest batch that is allowed waits until the next weights are on their way: its answers go on under
those, and are fresher than answers that were given before, with engines that stood idle until then. What is too old nevertheless,
because a round failed or an engine was restarted, is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

PATIENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBound:
    """`batch` is how many groups a step uses. `enforced` False: nothing is too old (the control run, which never publishes)."""

    staleness: int
    batch: int
    enforced: bool = True

    def may_ask(self, asked: int, served: int, offered: int) -> bool:
        """Whether one more group may be asked for, after `asked` of them, while the engines serve that version and read `offered`.

        Group number `asked` is for step `asked // batch`, which trains that version's successor. Below a bound of PATIENT nothing waits
        for an offer: the trainer, which makes it, would wait for the answers.
        """
        ahead = asked // self.batch - served
        if ahead == self.staleness >= PATIENT:
            return offered > served
        return ahead <= self.staleness

    def fresh(self, oldest: int, version: int) -> bool:
        """Whether tokens as old as that may teach these weights."""
        return not self.enforced or version - oldest <= self.staleness
