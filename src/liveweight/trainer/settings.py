"""How a publisher runs its rounds: one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from liveweight.observe.events import OfferKind
from liveweight.spec.deadline import Deadline
from liveweight.wire.messages.values import KvPolicy

Behind: TypeAlias = Literal["serve", "stand_back"]
"""What a replica does after the others committed a version without it."""
PATIENCE = 0.75
"""The share of a round's time that replicas have which the quorum can do without; the rest is for the replicas that go on."""
GRACE_S = 30.0
"""How long an engine may take to report the outcome of a step that was sent to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """How rounds are run. `quorum` None: all replicas must commit. `release_s`: how long a freeze waits for slow readers.

    With a quorum, `replica_timeout_s` is how long one replica may take to stage and verify before the others go on without it; None: most
    of the round's time. `behind` is what it does then: it goes on serving what it has, or stands back until it has caught up.

    `kv_policy` is for requests that run at a commit; None: as each engine is set.
    """

    offer: OfferKind = "frozen"
    verify: bool = True
    timeout_s: float = 60.0
    lease_s: float = 10.0
    release_s: float = 5.0
    quorum: int | None = None
    replica_timeout_s: float | None = None
    behind: Behind = "serve"
    kv_policy: KvPolicy | None = None


def last_steps_s(settings: PublisherSettings, engines: int) -> float:
    """How long votes, commits and aborts may take at the most, after a round's own deadline."""
    return 3 * settings.lease_s + engines * GRACE_S


def patience_of(settings: PublisherSettings, deadline: Deadline) -> Deadline:
    """Until when a round that begins now waits for replicas that it can do without."""
    wanted = settings.replica_timeout_s
    return deadline.within(PATIENCE * deadline.remaining_s() if wanted is None else wanted)
