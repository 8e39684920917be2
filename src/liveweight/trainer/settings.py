"""How a publisher runs its rounds: one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from liveweight.observe.events import OfferKind
from liveweight.wire.values import KvPolicy


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
