"""Snapshot saving: the ranks of a replica write its versions to a store in the background.

Owns a thread in the engine's process and the listener that ranks connect to. A commit wakes the thread; it begins a snapshot, asks every
rank to write what it holds (rank/snapshot_writing), compares the result with the leader's digests of the version, and commits. If weights
are swapped meanwhile, the snapshot is abandoned and removed: a snapshot holds one version. Serving goes on whatever happens here.
"""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from liveweight.engine.config import EngineConfig, Snapshots
from liveweight.engine.recovery.snapshot_messages import (
    RankNoted,
    RankPresent,
    SavingMessage,
    SnapshotNotWritten,
    SnapshotWritten,
    StopWriting,
    WriteSnapshot,
)
from liveweight.engine.serving.step_stream import weights_text
from liveweight.engine.status import SavingStatus
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    DigestMismatch,
    LiveWeightError,
    SnapshotDamaged,
    SnapshotNotFound,
    Unavailable,
    WeightsExchanged,
)
from liveweight.observe import events as ev
from liveweight.observe.bus import Bus
from liveweight.rounds.replica import ReplicaRefused, WireReplica
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.transports.snapshot.disk.open_snapshot import OpenSnapshot
from liveweight.transports.snapshot.disk.snapshot_draft import SnapshotDraft
from liveweight.transports.snapshot.disk.store import Store
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.listener import Incoming, Listener
from liveweight.wire.messages import Verify

IDLE_S = 60.0
SEND_S = 5.0
STOP_S = 10.0
"""How long ranks may take to stop writing."""


@dataclass(slots=True)
class _Job:
    """One snapshot under way: its version, the number of commits at its begin, and the ranks' answers."""

    number: int
    version: Version
    commits: int
    deadline: Deadline
    answers: dict[int, SnapshotWritten | SnapshotNotWritten] = field(default_factory=dict)

    def fault(self) -> LiveWeightError | None:
        """The fault of a rank that has not written; WeightsExchanged if a rank holds other weights; else None."""
        failed = [one for one in self.answers.values() if isinstance(one, SnapshotNotWritten)]
        named = next((one.fault for one in failed if one.fault is not None), None)
        if named is not None:
            return named.to_error()
        return WeightsExchanged(f"{self.version} is not held any more") if failed else None


class SnapshotSaver:
    """Writes snapshots of one replica until closed. `status` is for any thread."""

    def __init__(
        self, snapshots: Snapshots, *, leader: str, secret: Secret, replica: str, world: int, bus: Bus
    ) -> None:
        self._snapshots, self._name, self._world, self._bus = snapshots, replica, world, bus
        self._store = Store(Path(snapshots.directory))
        self._replica = WireReplica(leader, secret)
        self._socket_directory = tempfile.TemporaryDirectory(prefix="liveweight-saving-")
        listener: Listener[SavingMessage] = Listener(
            f"ipc://{self._socket_directory.name}/ranks", secret, Codec(SavingMessage), bus=bus
        )
        self.address, self._waker = listener.address, listener.waker()
        self._peers: dict[int, bytes] = {}
        self._commits = self._numbers = 0
        self._due = self._owed = self._closing = False
        self._status = self._newest_complete()
        self._subscription = bus.subscribe(self._on_event)
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="liveweight-saving", daemon=True
        )
        self._thread.start()

    def config_for_ranks(self, config: EngineConfig) -> EngineConfig:
        """The engine's configuration for ranks: with the address where they receive which snapshots to write."""
        return msgspec.structs.replace(
            config, snapshots=msgspec.structs.replace(self._snapshots, address=self.address)
        )

    def status(self) -> SavingStatus:
        """The snapshots at this moment."""
        return self._status

    def close(self) -> None:
        """Abandon the snapshot that is being written, and end the thread."""
        self._subscription.close()
        self._closing = True
        self._replica.interrupt()
        self._waker.wake()
        self._thread.join()
        self._replica.close()
        self._socket_directory.cleanup()

    def _on_event(self, event: ev.AnyEvent) -> None:
        """Called by the bus on the leader's thread."""
        match event:
            case ev.RoundCommitted(rank=None) | ev.RoundUndone():
                self._commits += 1
                self._due = self._due or self._owed or self._commits % self._snapshots.every == 0
                self._waker.wake()
            case _:
                return

    def _run(self, listener: Listener[SavingMessage]) -> None:
        with listener:
            while not self._closing:
                self._on_message(listener, self._next(listener, Deadline.after(IDLE_S)), None)
                while self._due and not self._closing:
                    self._save(listener)

    def _next(self, listener: Listener[SavingMessage], deadline: Deadline) -> Incoming[SavingMessage] | None:
        try:
            return listener.receive_or_wake(deadline, "a rank or a commit")
        except DeadlineExceeded:
            return None

    def _on_message(
        self,
        listener: Listener[SavingMessage],
        incoming: Incoming[SavingMessage] | None,
        job: _Job | None,
    ) -> None:
        """Take a rank's message; an answer counts only for the snapshot that it belongs to."""
        if incoming is None:
            return
        match incoming.body:
            case RankPresent(rank=rank):
                self._peers[rank] = incoming.peer
                listener.send(incoming.peer, RankNoted(), incoming.call, Deadline.after(SEND_S))
            case SnapshotWritten() | SnapshotNotWritten() as answer if (
                job is not None and answer.number == job.number
            ):
                job.answers[answer.rank] = answer
            case _:
                return

    # One snapshot.

    def _save(self, listener: Listener[SavingMessage]) -> None:
        """Write the version that serves now, unless the store has it. Failures become events and the status; serving goes on."""
        self._due = self._owed = False
        began_s, self._numbers, commits = time.monotonic(), self._numbers + 1, self._commits
        version: Version | None = None
        try:
            version = self._replica.replica_state(Deadline.after(self._snapshots.timeout_s)).serving
            if version is None or self._is_newest(version):
                return
            self._status = replace(self._status, writing=version)
            deadline = Deadline.after(self._snapshots.timeout_s)
            job = _Job(number=self._numbers, version=version, commits=commits, deadline=deadline)
            self._write(listener, job, began_s)
        except (LiveWeightError, ReplicaRefused) as error:
            self._failed(version, error.to_error() if isinstance(error, ReplicaRefused) else error)
        except Exception as error:  # a bug, or a failing file system, must not end the thread
            self._failed(version, Unavailable(f"{type(error).__name__}: {error}"))
        finally:
            self._status = replace(self._status, writing=None)

    def _write(self, listener: Listener[SavingMessage], job: _Job, began_s: float) -> None:
        version = job.version
        with self._store.begin(str(version.label)) as draft:
            try:
                self._collect_parts(listener, job, draft)
                expected = self._expected(job)
                commit = draft.commit(version, ranks=self._world, expected=expected)
            except BaseException:
                self._stop_ranks(listener, job)
                raise
        self._status = replace(self._status, newest=version, path=str(draft.path), failed=None)
        self._bus.emit(
            ev.SnapshotSaved(
                replica=self._name,
                version=str(version),
                path=str(draft.path),
                size_bytes=commit.weights_bytes,
                took_s=time.monotonic() - began_s,
            )
        )
        self._store.prune(self._snapshots.keep)

    def _collect_parts(self, listener: Listener[SavingMessage], job: _Job, draft: SnapshotDraft) -> None:
        """Ask every rank to write its files, and wait until all have."""
        order = WriteSnapshot(
            number=job.number,
            directory=str(draft.path.absolute()),
            snapshot=draft.snapshot,
            weights=weights_text(job.version),
        )
        for rank in range(self._world):
            self._send(listener, rank, order)
        while len(job.answers) < self._world:
            self._check_still_served(job)
            missing = [str(rank) for rank in range(self._world) if rank not in job.answers]
            job.deadline.check(f"rank {', '.join(missing)} to write its part of a snapshot")
            self._on_message(listener, self._next(listener, job.deadline), job)
            fault = job.fault()
            if fault is not None:
                raise fault

    def _stop_ranks(self, listener: Listener[SavingMessage], job: _Job) -> None:
        """Wait until no rank writes into the directory any more, for at most STOP_S; then `prune` removes what is left."""
        deadline = Deadline.after(0.0 if self._closing else STOP_S)
        for rank in set(range(self._world)) - set(job.answers):
            self._send(listener, rank, StopWriting(number=job.number))
        while len(job.answers) < self._world and not deadline.over and not self._closing:
            self._on_message(listener, self._next(listener, deadline), job)

    def _send(self, listener: Listener[SavingMessage], rank: int, body: SavingMessage) -> None:
        """Send to a rank, if it is connected. The engine loop notices a rank that is gone, and ends the engine."""
        peer = self._peers.get(rank)
        if peer is None:
            return
        try:
            listener.send(peer, body, 0, Deadline.after(SEND_S))
        except (ChannelClosed, DeadlineExceeded):
            return

    def _expected(self, job: _Job) -> Manifest | None:
        """The version's manifest: the ranks' live weights, digested anew and compared with the published version."""
        verdict = self._replica.verify(
            Verify(listed=True, timeout_s=job.deadline.remaining_s()), job.deadline
        )
        self._check_still_served(job)
        if verdict.serving != job.version:
            raise WeightsExchanged(f"{job.version} is not held any more")
        if verdict.match is False:
            names = [one.name for one in verdict.mismatches]
            raise DigestMismatch(names, f"{self._name}, which serves {job.version}")
        return verdict.manifest

    def _check_still_served(self, job: _Job) -> None:
        if self._closing or self._commits != job.commits:
            raise WeightsExchanged(f"{job.version} is not held any more")

    def _failed(self, version: Version | None, error: LiveWeightError) -> None:
        """Record the failure. The next commit tries again, whatever `every` says."""
        self._owed = True
        if self._closing:
            return
        if isinstance(error, WeightsExchanged):
            self._bus.emit(ev.SnapshotAbandoned(replica=self._name, version=str(version)))
            return
        self._status = replace(self._status, failed=f"{error.code} {version}: {error}")
        reason = str(error)
        self._bus.emit(
            ev.SnapshotFailed(replica=self._name, version=str(version), code=error.code, reason=reason)
        )

    def _is_newest(self, version: Version) -> bool:
        self._status = replace(self._newest_complete(), failed=self._status.failed)
        return self._status.newest == version

    def _newest_complete(self) -> SavingStatus:
        """The status with the newest complete snapshot of the store; a damaged one counts as none."""
        given = self._snapshots
        status = SavingStatus(directory=given.directory, every=given.every, keep=given.keep)
        try:
            with OpenSnapshot(self._store.newest()) as snapshot:
                return replace(status, newest=snapshot.commit.version, path=str(snapshot.path))
        except (SnapshotNotFound, SnapshotDamaged):
            return status
