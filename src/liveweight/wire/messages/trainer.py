"""Among the ranks of one trainer: the other ranks report to rank 0. Weights never pass through here."""

from __future__ import annotations

from liveweight.spec.layout import Layout
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault


class RegisterRank(Body, frozen=True):
    """A trainer's rank registers with rank 0. -> RankRegistered, once all ranks have.

    `fault`: the rank cannot take part, for that reason; every rank is told.
    """

    rank: int
    world: int
    fault: Fault | None = None


class RankRegistered(Body, frozen=True):
    """What the engines expect, which says in which dtypes, and under which names, shards are offered; and the run's name.

    `towards`: the address of an engine on another host, empty where there is none.
    """

    expected: Manifest
    run: str
    towards: str = ""


class AnnounceShards(Body, frozen=True):
    """Where a rank will freeze its shards, and which parts of which tensors these are. -> ShardsAccepted, once the engines agree.

    `kept_layout`: its parts of tensors that engines keep; `kept_lanes` are their digests, 16 bytes per placement.
    """

    rank: int
    source: str
    layout: Layout
    kept_layout: Layout | None = None
    kept_lanes: bytes = b""
    fault: Fault | None = None


class ShardsAccepted(Body, frozen=True):
    """Rounds may begin. `size_bytes` is a whole version's."""

    size_bytes: int


class ShardsFrozen(Body, frozen=True):
    """Notification from a rank: its shards of that version are frozen, with these digests (16 bytes per placement), or they are not.

    `number` counts the rounds that a rank began; all ranks begin the same ones.
    """

    rank: int
    number: int
    label: str | int
    generation: int
    lanes: bytes
    seconds: float
    fault: Fault | None = None


class GetOutcome(Body, frozen=True):
    """How did that round end? Answered when it has, or after `wait_s`. -> Outcome or OutcomePending."""

    rank: int
    number: int
    wait_s: float


class OutcomePending(Body, frozen=True):
    """It has not ended. `begun`: rank 0 has begun it, too."""

    begun: bool


class Outcome(Body, frozen=True):
    """How a round ended, as rank 0 knows it: a report in msgpack; or what failed, where (`replica`: in a round), what still serves.
    `answers`: whether that replica answered."""

    number: int
    version: Version
    report: bytes | None = None
    fault: Fault | None = None
    replica: str | None = None
    serving: str | None = None
    answers: bool = True


class Probe(Body, frozen=True):
    """Notification to a rank, without content: checks that the connection still works."""
