"""How a publisher runs its rounds: one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from liveweight.observe.events import OfferKind
from liveweight.wire.values import KvPolicy

GRACE_S = 30.0
"""How long an engine may take to say what became of a step that it was told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """How rounds are run. `quorum` None: all replicas must commit. `release_s`: how long a freeze waits for slow readers.

    `kv_policy` is for requests that run at a commit; None: as each engine is set.
    """

    offer: OfferKind = "frozen"
    verify: bool = True
    timeout_s: float = 60.0
    lease_s: float = 10.0
    release_s: float = 5.0
    quorum: int | None = None
    kv_policy: KvPolicy | None = None


def last_steps_s(settings: PublisherSettings, engines: int) -> float:
    """How long votes, commits and aborts may take at the most, after a round's own deadline."""
    return 3 * settings.lease_s + engines * GRACE_S
