"""The staleness bound: how far generation may run ahead of training, and which samples are too old to learn from.

Pure. Before a batch is requested, the bound computes which step will use it; if the engines would still serve weights that are too old
for that step, the request waits. The oldest batch that is allowed waits until the next weights are offered: its answers continue under
those weights, and so are fresher than answers that were finished before, after which the engines would be idle. Samples that are too old
nevertheless, because a round failed or an engine was restarted, are dropped.
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

    def may_request(self, requested: int, served: int, offered: int) -> bool:
        """Whether one more group may be requested after `requested` of them, while the engines serve version `served` and read `offered`.

        Group number `requested` is for step `requested // batch`, which trains that version's successor. Below a bound of PATIENT no
        request waits for an offer: the trainer, which makes the offer, would wait for the answers.
        """
        ahead = requested // self.batch - served
        if ahead == self.staleness >= PATIENT:
            return offered > served
        return ahead <= self.staleness

    def fresh(self, oldest: int, version: int) -> bool:
        """Whether these weights may learn from tokens of version `oldest`."""
        return not self.enforced or version - oldest <= self.staleness
