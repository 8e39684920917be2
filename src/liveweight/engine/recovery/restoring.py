"""Restoring: a replica whose ranks were restarted gets back the version that it had, before it serves anybody.

Restarted ranks hold their checkpoint. The restorer reads the former version from the engine's snapshots, or from its source, in a round
like any other against the engine's own leader: staged, digested, compared, committed. If a candidate cannot be read, the restorer notes
why and tries the next best; the last is the checkpoint. A publisher's round that opens first goes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from liveweight.engine.engine import Engine
from liveweight.engine.rank.start_version import RUN
from liveweight.engine.status import Origin
from liveweight.engine.updates.requested_update import LEASE_S, RequestedVersion
from liveweight.errors import (
    LiveWeightError,
    ManifestInvalid,
    RoundFailed,
    RoundOpen,
    SnapshotDamaged,
    SnapshotNotFound,
)
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.rounds.coordinator import MARGIN_S, RoundCoordinator
from liveweight.rounds.read_lease import ReadLease
from liveweight.rounds.replica import WireReplica
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.spec.deadline import Deadline
from liveweight.spec.digest import from_hex
from liveweight.spec.manifest import Manifest, Version
from liveweight.spec.version_age import older
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.offer_record import offer_of
from liveweight.transports.snapshot.verify import verify
from liveweight.wire import messages as m
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.host_identity import this_host
from liveweight.wire.waker import Waker

RECOVERY = "recovery"
"""The publisher's name in these rounds."""
POLL_S = 0.1
OFFER_S = 10.0
"""A source that has not answered by then is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredVersion:
    """The version that the replica serves now, where it came from, and the candidates that failed before."""

    version: Version
    origin: Origin
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class VersionRestorer:
    """Restores one engine, once, on one thread; waking `cancel` from another thread ends it.

    `wanted` is the version that it had; None: the newest that can be found. `pause` waits that many seconds, and raises if it is to end.
    """

    engine: Engine
    wanted: Version | None
    pause: Callable[[float], None]
    cancel: Waker
    _notes: list[str] = field(default_factory=list)

    def restore(self) -> RestoredVersion:
        """Install the version that the engine had, or the next best. Raises the engine's own fault (RankLost, ...) if it failed."""
        if self.engine.config.updates is None or self.wanted == self.engine.start:
            return self._at_start()
        deadline = Deadline.after(self.engine.config.start_timeout_s)
        for origin, what, install in self._candidates():
            try:
                done = self._install_unless_round_open(install, deadline)
            except LiveWeightError as error:
                self._check_alive(error)
                self._notes.append(f"{what}: {error}")
                continue
            version = self.engine.update_status().serving
            if version is not None:
                return RestoredVersion(
                    version=version, origin=origin if done else "publisher", notes=tuple(self._notes)
                )
        return self._at_start()

    def _at_start(self) -> RestoredVersion:
        return RestoredVersion(version=self.engine.start, origin="checkpoint", notes=tuple(self._notes))

    def _check_alive(self, error: LiveWeightError) -> None:
        """Raise the engine's fault if the engine failed; return if only the version could not be read."""
        self.pause(0.0)
        fault = self.engine.status().fault
        if fault is not None:
            raise fault from error

    def _install_unless_round_open(self, install: Callable[[Deadline], None], deadline: Deadline) -> bool:
        """Install the candidate, unless a publisher's round is open and installs its version. Returns whether the candidate was."""
        while True:
            try:
                install(deadline)
            except RoundOpen:
                deadline.check("another round to end")
            except RoundFailed as failed:
                if not isinstance(failed.cause, RoundOpen) or deadline.over:
                    raise
            else:
                return True
            self.pause(POLL_S)
            update_status = self.engine.update_status()
            if update_status.round is None and update_status.serving not in (None, self.engine.start):
                return False

    # Candidates.

    def _candidates(self) -> Iterator[tuple[Origin, str, Callable[[Deadline], None]]]:
        """In the order in which they are tried: the version itself; then the source's newest and other snapshots, the newer first."""
        found = self._snapshots()
        exact = [
            (path, version)
            for path, version in found
            if self.wanted is not None and version.same_name(self.wanted)
        ]
        only_start = self.wanted is not None and self.wanted.run == RUN
        others = [] if only_start else [one for one in found if one not in exact]
        yield from (self._of_snapshot(path) for path, _ in exact)
        offered = self._offered()
        newer = [one for one in others if offered is not None and older(offered, one[1])]
        yield from (self._of_snapshot(path) for path, _ in newer)
        if offered is not None:
            yield "offer", f"{offered} from {self._source}", lambda deadline: self._update(offered, deadline)
        yield from (self._of_snapshot(path) for path, version in others if (path, version) not in newer)

    def _snapshots(self) -> list[tuple[Path, Version]]:
        """The complete snapshots, newest first; damaged ones are noted."""
        config = self.engine.config.snapshots
        found = list[tuple[Path, Version]]()
        for path in reversed([] if config is None else Store(Path(config.directory)).complete()):
            try:
                with OpenSnapshot(path) as snapshot:
                    found.append((path, snapshot.commit.version))
            except (SnapshotDamaged, SnapshotNotFound) as error:
                self._notes.append(str(error))
        return found

    @property
    def _source(self) -> str | None:
        updates = self.engine.config.updates
        return None if updates is None else updates.source

    def _offered(self) -> Version | None:
        """The newest version that the engine's source offers; None without a source or an answer."""
        updates = self.engine.config.updates
        if updates is None or updates.source is None:
            return None
        try:
            with ReadLease(
                updates.source,
                load_or_create_secret(Path(updates.secret_file)),
                requester=f"{self.engine.name}, in {RECOVERY}",
                version=None,
                lease_s=OFFER_S,
                deadline=Deadline.after(OFFER_S),
                cancel=self.cancel,
            ) as lease:
                return lease.grant.version
        except LiveWeightError as error:
            self._check_alive(error)
            self._notes.append(f"{updates.source}: {error}")
            return None

    # Installing a candidate.

    def _update(self, version: Version, deadline: Deadline) -> None:
        request = RequestedVersion(call=RECOVERY, version=version.label, timeout_s=deadline.remaining_s())
        self.engine.update_weights(request)

    def _of_snapshot(self, path: Path) -> tuple[Origin, str, Callable[[Deadline], None]]:
        return "snapshot", str(path), lambda deadline: self._install(path, deadline)

    def _install(self, path: Path, deadline: Deadline) -> None:
        """Run a round whose offer is the snapshot."""
        updates = self.engine.config.updates
        with ExitStack() as stack:
            snapshot = stack.enter_context(OpenSnapshot(path))
            if updates is not None and updates.shadow == "none":
                self._verify_snapshot(snapshot, deadline)
            secret = load_or_create_secret(Path(updates.secret_file if updates is not None else ""))
            replica = WireReplica(self.engine.address or "", secret)
            stack.callback(replica.close)
            commit = snapshot.commit
            order = m.Open(
                publisher=RECOVERY,
                version=commit.version,
                structure=f"snapshot {commit.snapshot}",
                digests=_digests(commit.manifest),
                offer=offer_of(snapshot),
                verify=True,
                timeout_s=deadline.remaining_s() + LEASE_S + MARGIN_S,
                kv_policy=None,
                host=this_host(),
                pid=os.getpid(),
            )
            RoundCoordinator(
                replicas=[ReplicaProgress(replica)],
                order=order,
                description=m.Describe(structure=order.structure, manifest=commit.manifest.without_digests()),
                quorum=1,
                lease_s=LEASE_S,
                deadline=deadline,
                pool=stack.enter_context(
                    ThreadPoolExecutor(1)
                ),  # the coordinator uses no thread of it for one replica
                on_staged=lambda: None,
                closing=lambda: self.cancel.woken,
            ).run()

    def _verify_snapshot(self, snapshot: OpenSnapshot, deadline: Deadline) -> None:
        """Raise SnapshotDamaged before any byte of it overwrites the only weights that there are."""

        def check(_: int) -> None:
            self.pause(0.0)
            deadline.check(f"all of {snapshot.path} to be verified")

        verify(snapshot, check)


def _digests(manifest: Manifest) -> bytes:
    known = [spec.digest for spec in manifest if spec.digest is not None]
    if len(known) < len(manifest.tensors):
        raise ManifestInvalid("a snapshot without the digests of its tensors cannot be verified")
    return lanes_to_bytes(np.stack([from_hex(digest) for digest in known]))
