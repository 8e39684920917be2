"""Verification of live weights: all ranks' digests against the installed version, a manifest, or a version that the source offers.

The verifier calls the engine's own leader, as any publisher may. Rounds and requests go on meanwhile.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, TypeAlias

from liveweight.errors import ManifestInvalid, WrongState
from liveweight.plan.digest_sums import lanes_from_bytes
from liveweight.rounds.read_lease import ReadLease
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import to_hex
from liveweight.spec.manifest import Manifest, Version
from liveweight.wire.credentials import Secret
from liveweight.wire.messages import Verdict, Verify
from liveweight.wire.messages.source import ReadLeaseGranted
from liveweight.wire.waker import Waker

Against: TypeAlias = Literal["installed", "manifest", "source"]
"""What is compared with: the version that is installed, a manifest that the caller gives, a version that the source offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """What to verify. `names` None: all tensors; `version` is the source's, None its newest; `listed`: every digest."""

    against: Against = "installed"
    names: tuple[str, ...] | None = None
    manifest: Manifest | None = None
    version: str | int | None = None
    listed: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """The verdict, and which version it was compared with; None: with a manifest, or with nothing."""

    verdict: Verdict
    compared_with: Version | None


class Verifier:
    """For any thread. One request at a time; others wait. Ends with `close`."""

    def __init__(self, leader: str, secret: Secret, *, source: str | None, replica: str) -> None:
        self._replica, self._secret = WireReplica(leader, secret), secret
        self._source, self._name = source, replica
        self._lock = threading.Lock()
        self._cancel = Waker()

    def verify(self, request: VerificationRequest) -> VerificationResult:
        """Verify. ManifestMismatch with names that the engine does not have; WrongState for a source where there is none;
        WeightsExchanged where rounds left no time; DeadlineExceeded with the ranks that did not answer."""
        deadline = Deadline.after(request.timeout_s)
        compared_with, manifest = None, request.manifest
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.exceeded("another verification to end")
        try:
            if request.against == "source":
                compared_with, manifest = self._offered(request, deadline)
            verdict = self._ask(request, manifest, deadline)
        finally:
            self._lock.release()
        if request.against == "installed" and verdict.match is not None:
            compared_with = verdict.serving
        return VerificationResult(verdict=verdict, compared_with=compared_with)

    def close(self) -> None:
        """End the running verification, and refuse others."""
        self._cancel.wake()
        self._replica.interrupt()
        with self._lock:
            self._replica.close()
            self._cancel.close()

    def _ask(self, request: VerificationRequest, manifest: Manifest | None, deadline: Deadline) -> Verdict:
        body = Verify(
            names=request.names,
            manifest=manifest,
            listed=request.listed,
            timeout_s=deadline.remaining_s(),
        )
        try:
            return self._replica.verify(body, deadline)
        except ReplicaRefused as refused:
            raise refused.to_error() from refused

    def _offered(self, request: VerificationRequest, deadline: Deadline) -> tuple[Version, Manifest]:
        """Version and manifest that the source offers; its memory is not read."""
        if self._source is None:
            raise WrongState("started without a source (--weights-from)", "a comparison with it")
        label = None if request.version is None else str(request.version)
        with ReadLease(
            self._source,
            self._secret,
            requester=f"{self._name}, for a comparison",
            version=label,
            lease_s=deadline.remaining_s(),
            deadline=deadline,
            cancel=self._cancel,
        ) as lease:
            return lease.grant.version, _with_digests(lease.grant)


def _with_digests(grant: ReadLeaseGranted) -> Manifest:
    if grant.digests is None:
        raise ManifestInvalid(f"the source offers {grant.version} without the digests of its tensors")
    lanes = lanes_from_bytes(grant.digests, len(grant.manifest.tensors))
    return grant.manifest.with_digests([to_hex(digest) for digest in lanes])
