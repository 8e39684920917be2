"""Verifying: what all ranks hold now, beside the version that is installed, a manifest, or what the engine's source offers.

It asks the engine's own leader, as any publisher may. Rounds and requests go on meanwhile.
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
    """What an operator wants to know. `names` None: all tensors; `version` is the source's, None its newest; `listed`: every digest."""

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
    """For any thread. One question at a time; others wait. Ends with `close`."""

    def __init__(self, leader: str, secret: Secret, *, source: str | None, replica: str) -> None:
        self._replica, self._secret = WireReplica(leader, secret), secret
        self._source, self._name = source, replica
        self._asking = threading.Lock()
        self._cancel = Waker()

    def verify(self, question: VerificationRequest) -> VerificationResult:
        """Ask. ManifestMismatch with names that the engine does not have; WrongState for a source where there is none;
        WeightsExchanged where rounds left no time; DeadlineExceeded with the ranks that did not answer."""
        deadline = Deadline.after(question.timeout_s)
        compared_with, manifest = None, question.manifest
        if not self._asking.acquire(timeout=deadline.remaining_s()):
            raise deadline.exceeded("another verification to end")
        try:
            if question.against == "source":
                compared_with, manifest = self._offered(question, deadline)
            verdict = self._ask(question, manifest, deadline)
        finally:
            self._asking.release()
        if question.against == "installed" and verdict.match is not None:
            compared_with = verdict.serving
        return VerificationResult(verdict=verdict, compared_with=compared_with)

    def close(self) -> None:
        """End the question that is asked, and take no other."""
        self._cancel.wake()
        self._replica.interrupt()
        with self._asking:
            self._replica.close()
            self._cancel.close()

    def _ask(self, question: VerificationRequest, manifest: Manifest | None, deadline: Deadline) -> Verdict:
        body = Verify(
            names=question.names,
            manifest=manifest,
            listed=question.listed,
            timeout_s=deadline.remaining_s(),
        )
        try:
            return self._replica.verify(body, deadline)
        except ReplicaRefused as refused:
            raise refused.to_error() from refused

    def _offered(self, question: VerificationRequest, deadline: Deadline) -> tuple[Version, Manifest]:
        """What the source offers; its memory is not read."""
        if self._source is None:
            raise WrongState("started without a source (--weights-from)", "a comparison with it")
        label = None if question.version is None else str(question.version)
        with ReadLease(
            self._source,
            self._secret,
            requester=f"{self._name}, for a comparison",
            version=label,
            lease_s=deadline.remaining_s(),
            deadline=deadline,
            cancel=self._cancel,
        ) as lease:
            return lease.held.version, _with_digests(lease.held)


def _with_digests(held: ReadLeaseGranted) -> Manifest:
    if held.digests is None:
        raise ManifestInvalid(f"the source offers {held.version} without the digests of its tensors")
    lanes = lanes_from_bytes(held.digests, len(held.manifest.tensors))
    return held.manifest.with_digests([to_hex(digest) for digest in lanes])
