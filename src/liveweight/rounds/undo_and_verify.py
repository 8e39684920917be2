"""A publisher's calls to one replica outside a round: undo, stop reading a source, verify live weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from liveweight.errors import DeadlineExceeded, LiveWeightError, OutcomeUnknown, RoundFailed, WireError
from liveweight.rounds.replica import Replica, ReplicaRefused
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.messages import Verdict, Verify
from liveweight.wire.messages.values import RoundId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerdict:
    """One replica's live weights, compared with the published version. `verdict` None: they could not be compared, and `fault` says why."""

    name: str
    verdict: Verdict | None
    fault: LiveWeightError | None = None

    @property
    def match(self) -> bool | None:
        """Whether the replica holds exactly the published version; None: unknown."""
        return None if self.verdict is None else self.verdict.match

    @property
    def read(self) -> Literal["installed", "staged"] | None:
        """Whether all that it computes with was read, or of some tensors only the copy that they were installed from."""
        return None if self.verdict is None else "staged" if self.verdict.unread else "installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Every replica's verdict on the version that was published last."""

    version: Version
    replicas: tuple[ReplicaVerdict, ...]

    @property
    def match(self) -> bool | None:
        """True: all replicas hold it. False: at least one does not. None: at least one is unknown, and the others hold it."""
        matches = [replica.match for replica in self.replicas]
        return False if False in matches else None if None in matches else True


def undo_replica(replica: Replica, publisher: str, deadline: Deadline) -> Version | None:
    """Undo, and return the version that serves then. Raises RoundFailed if the replica refuses, OutcomeUnknown if it does not answer."""
    try:
        return replica.undo(publisher, deadline).serving
    except ReplicaRefused as refused:
        fault, serving = refused.fault, refused.serving
    except (DeadlineExceeded, WireError) as error:
        raise OutcomeUnknown(f"{replica.name} was told to undo and did not answer: {error}") from error
    raise RoundFailed(
        fault.to_error(),
        replica=replica.name,
        rank=fault.rank,
        step="undo",
        waited_s=fault.waited_s,
        serving=None if serving is None else str(serving),
    )


def may_still_read(replica: Replica, round_id: RoundId, deadline: Deadline) -> bool:
    """Tell the replica to stop reading a round's source. Returns whether one of its ranks may still read."""
    try:
        return bool(replica.abort(round_id, "the source is needed", deadline))
    except ReplicaRefused:
        return False  # the round has ended there
    except LiveWeightError:
        return True


def verify_replica(replica: Replica, manifest: Manifest, deadline: Deadline) -> ReplicaVerdict:
    """Compare the live weights of its ranks with the manifest. Raises no LiveWeightError: the error is in the result."""
    body = Verify(manifest=manifest, timeout_s=deadline.remaining_s())
    try:
        return ReplicaVerdict(name=replica.name, verdict=replica.verify(body, deadline))
    except ReplicaRefused as refused:
        return ReplicaVerdict(name=replica.name, verdict=None, fault=refused.to_error())
    except LiveWeightError as error:
        return ReplicaVerdict(name=replica.name, verdict=None, fault=error)
