"""Between a publisher and a replica's leader: a round from open to commit, and back."""

from __future__ import annotations

from typing import Literal, TypeAlias

from liveweight.spec.manifest import KeptSet, Manifest, OptionalGroup, Version
from liveweight.wire.messages.body import Body
from liveweight.wire.messages.values import Fault, KvPolicy, Mismatch, Offer, RankTimes, RoundId

Phase: TypeAlias = Literal["open", "staged", "verified", "ready", "committing", "done", "failed"]
"""How far a round has come, in order; `done` and `failed` are ends."""
ORDER: dict[Phase, int] = {
    "open": 0,
    "staged": 1,
    "verified": 2,
    "ready": 3,
    "committing": 4,
    "done": 5,
    "failed": 6,
}


class GetReplicaState(Body, frozen=True):
    """What does the replica expect, and what does it serve? Answered once all its ranks have joined. -> ReplicaState."""

    wait_s: float


class ReplicaState(Body, frozen=True):
    """A replica's state: the tensors that it expects, the version that it serves, and its open round.

    `serving_s` is for how long it has served that version. `optional` are the groups of tensors that an offer may leave out; `kept`, by
    name, those that the serving version left out. `not_serving` says what an engine does with requests while it does not serve
    them. `torn` says why nothing may serve, if an update in place failed. `met` are the last
    handshake tokens that controllers sent to the engine of this leader: a controller that finds its own token knows that the leader belongs
    to the engine, and not to one that outlived its server.
    """

    replica: str
    boot: str
    state: str
    expected: Manifest
    serving: Version | None
    undo: Version | None
    round: RoundId | None
    optional: tuple[OptionalGroup, ...] = ()
    kept: tuple[str, ...] = ()
    torn: str | None = None
    not_serving: str | None = None
    serving_s: float = 0.0
    met: tuple[str, ...] = ()


class Describe(Body, frozen=True):
    """The tensors that a publisher will offer, sent once; rounds name them by `structure`. -> Described.

    With `kept`, the replica digests those of its live tensors before it answers, for which it has `timeout_s`.
    """

    structure: str
    manifest: Manifest
    kept: KeptSet | None = None
    timeout_s: float = 60.0


class Described(Body, frozen=True):
    """The manifest fits what the replica expects, and kept tensors are what they should be."""


class Open(Body, frozen=True):
    """Begin a round. `digests` holds 16 bytes per tensor of the structure, in its order; none: content unknown. -> Opened.

    A verified round of a ring opens without them too: `Compare` brings them.

    `kv_policy` is for requests that run at its commit; None: as the engine is set. By `host` and `pid` a leader of the same host sees at
    once that the publisher has died.
    """

    publisher: str
    version: Version
    structure: str
    digests: bytes | None
    offer: Offer
    verify: bool
    timeout_s: float
    kv_policy: KvPolicy | None = None
    host: str = ""
    pid: int = 0


class Opened(Body, frozen=True):
    """The round is open, or, with `round` None, its version is installed already and there is nothing to do.

    `kept` names the groups of tensors that the offer leaves out, and that stay as they are. `in_place`: the replica reads the source
    during its commit, so the offer must hold until then.
    """

    round: RoundId | None
    serving: Version | None
    kept: tuple[str, ...] = ()
    in_place: bool = False


class WaitFor(Body, frozen=True):
    """Say when the round has come that far, or failed, or the wait is over. -> Progress."""

    round: RoundId
    until: Phase
    wait_s: float


class Progress(Body, frozen=True):
    """How far a round has come; which ranks are missing from its next step; what failed."""

    phase: Phase
    missing: tuple[int, ...]
    fault: Fault | None
    stage_s: float
    verify_s: float
    staged_bytes: int
    readers: tuple[int, ...]


class Compare(Body, frozen=True):
    """The digests of a round that was opened without them, 16 bytes per tensor of the structure. -> Compared.

    Its ranks have staged; what they verify is compared with these.
    """

    round: RoundId
    digests: bytes


class Compared(Body, frozen=True):
    """The digests are known; `WaitFor` says how the comparison ends."""


class RequestVote(Body, frozen=True):
    """Request the vote. A yes is valid for `lease_s` (the vote lease), from when it is given. -> Vote."""

    round: RoundId
    lease_s: float


class Vote(Body, frozen=True):
    """Yes: every rank holds the version, verified if that was asked. (A no is a Refusal.)"""


class Commit(Body, frozen=True):
    """Make the version visible at the next boundary, all ranks or none. -> Committed."""

    round: RoundId
    timeout_s: float


class Committed(Body, frozen=True):
    """All ranks serve this version; how long the slowest was stalled, and the times of each rank."""

    serving: Version | None
    undo: Version | None
    stall_s: float
    ranks: tuple[RankTimes, ...] = ()


class Abort(Body, frozen=True):
    """Abort the round. Answered when no rank reads its source any more, or the wait is over. -> Aborted."""

    round: RoundId
    reason: str
    wait_s: float


class Aborted(Body, frozen=True):
    """The round is over; these ranks may still be reading the source's memory."""

    readers: tuple[int, ...]


class MarkBehind(Body, frozen=True):
    """The others serve this version and the replica does not: let it take no requests until a round has brought it one. A notification."""

    version: Version
    reason: str


class Sleep(Body, frozen=True):
    """The engine gives memory back: refuse rounds from now on. Refused while one is open. From the engine's own process. -> SleepNoted."""

    weights: bool
    kv_cache: bool


class Wake(Body, frozen=True):
    """The engine holds again what it gave back. From the engine's own process. -> SleepNoted."""

    weights: bool
    kv_cache: bool


class SleepNoted(Body, frozen=True):
    """Noted."""


class Undo(Body, frozen=True):
    """Go back to the version before, at the next boundary. -> Committed."""

    publisher: str
    timeout_s: float


class Verify(Body, frozen=True):
    """Digest what all ranks hold live now, and compare it with the manifest, or with the version that is installed. -> Verdict.

    Of these tensors, or of all; a manifest may list a part of them. `listed`: return the digests that were found.
    """

    names: tuple[str, ...] | None = None
    manifest: Manifest | None = None
    listed: bool = False
    timeout_s: float = 60.0


class Verdict(Body, frozen=True):
    """What is installed, and whether it is what it should be; `match` None: there was nothing to compare it with.

    `serving` is what is said to be installed, `found` the version that the content is, if the replica knows one. `digest` is that of the
    whole, in the names of what it was compared with (else in the replica's own); None where only some tensors were asked for. Of `unread`
    tensors only the copy was read that they were installed from.
    """

    match: bool | None
    serving: Version | None
    found: Version | None
    digest: str | None
    tensors: int
    compared: int
    differing: int
    mismatches: tuple[Mismatch, ...]
    seconds: tuple[float, ...]
    manifest: Manifest | None = None
    unread: int = 0
