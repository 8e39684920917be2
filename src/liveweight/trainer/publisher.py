"""The publisher: what a training loop holds to send its weights to running engines.

Composes a trainer's parts: offers, replicas, and one drive per round in a background thread. `publish` returns when the engines
serve the version, or raises; it never hangs, and a failed round leaves the engines on what they served.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Self

from liveweight.errors import (
    DeadlineExceeded,
    LiveWeightError,
    OutcomeUnknown,
    Refused,
    RoundAborted,
    RoundFailed,
    WireError,
    WrongState,
)
from liveweight.observe.events import OfferKind
from liveweight.plan.tally import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.trainer.drive import MARGIN_S, Drive, Part
from liveweight.trainer.labels import Labels
from liveweight.trainer.offers import Made, Offers
from liveweight.trainer.replica import Replica, ReplicaRefused
from liveweight.trainer.report import Report
from liveweight.wire import messages as m
from liveweight.wire.values import KvPolicy, RoundId

GRACE_S = 30.0
LAST_COMMIT_S = 5.0
"""How long closing waits for a commit that engines were told of already."""


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


@dataclass(slots=True)
class _Round:
    """`strayed`: why its live offer must not be committed. Known before `staged` is set."""

    version: Version
    made: Made
    parts: list[Part]
    deadline: Deadline
    began_s: float
    drive: Drive | None = None
    outcome: Future[Report] = field(default_factory=Future)
    staged: threading.Event = field(default_factory=threading.Event)
    strayed: str | None = None


class Publisher:
    """Publishes one source's versions to replicas. Every method is for the training loop's thread."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        replicas: Sequence[Replica],
        offers: Offers,
        settings: PublisherSettings,
    ) -> None:
        self.name, self.run, self.settings = name, run, settings
        self._replicas, self._offers = list(replicas), offers
        if settings.quorum is not None and not 1 <= settings.quorum <= len(self._replicas):
            raise Refused(f"a quorum of {settings.quorum} of {len(self._replicas)} replicas")
        self._labels = Labels()
        self._last: _Round | None = None
        self._round: _Round | None = None
        self._missed = 0
        self._closing = threading.Event()
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="liveweight-driver")
        self._pool = ThreadPoolExecutor(max(1, len(self._replicas)), thread_name_prefix="liveweight-replica")

    def publish(self, label: str | int) -> Report:
        """Send the source's current weights as that version and wait until the engines serve it.

        Raises RoundFailed (the engines still serve what they served), VersionConflict for a label that stood for other content in this
        run, OutcomeUnknown where the engines' answer did not come in time.
        """
        self.offer(label)
        return self.wait()

    def offer(self, label: str | int) -> None:
        """Begin a round; returns as soon as the parameters may change: after the freeze, or, live, when all ranks have staged."""
        if self._closing.is_set():
            raise WrongState("closed", "offer")
        if self._round is not None:
            self.wait()  # an unwaited failure is raised here
        began_s = time.monotonic()
        made = self._offers.make(
            str(label), self.settings.offer, verify=self.settings.verify, release=self._release
        )
        try:
            current = self._begin(label, made, began_s)
            if made.offer.kind == "live":
                current.staged.wait(current.deadline.remaining_s() + GRACE_S)
        finally:  # also if we are interrupted: the parameters of a live offer may change from here on
            self._offers.end(made.offer)
        if current.strayed is not None:
            self._freeze_instead(label, current, current.strayed)

    def _begin(self, label: str | int, made: Made, began_s: float) -> _Round:
        digest = None if made.lanes is None else self._offers.content.of(made.lanes)
        version = Version(run=self.run, label=label, digest=digest)
        self._labels.check(version)
        parts = [Part(replica) for replica in self._replicas]
        # The round's time; the freeze before it waits for nobody but slow readers, and for them `release_s`.
        current = _Round(version, made, parts, Deadline.after(self.settings.timeout_s), began_s)
        current.drive = drive = self._drive(current)
        current.outcome = self._driver.submit(self._run, current, drive)
        current.outcome.add_done_callback(lambda _: current.staged.set())
        self._round = self._last = current
        return current

    def _freeze_instead(self, label: str | int, live: _Round, reason: str) -> None:
        """Parameters lie elsewhere: the round of the live offer is given up, and one of a frozen offer takes its place."""
        self._round = None
        futures.wait([live.outcome], GRACE_S)
        made = self._offers.freeze(str(label), reason, release=self._release)
        self._begin(label, made, live.began_s)

    def wait(self) -> Report:
        """The outcome of the round that `offer` began."""
        current, self._round = self._round, None
        if current is None:
            raise WrongState("without a round", "wait")
        try:
            return current.outcome.result(current.deadline.remaining_s() + self._last_steps_s())
        except FutureTimeout:
            raise OutcomeUnknown(f"{current.version}: the round did not end in time") from None

    def _last_steps_s(self) -> float:
        """How long votes, commits and aborts may take at the most, after the round's own deadline."""
        return 3 * self.settings.lease_s + len(self._replicas) * GRACE_S

    def undo(self) -> tuple[Version | None, ...]:
        """Take every engine back to the version before, and say what each serves now.

        Raises RoundFailed where an engine refuses, OutcomeUnknown where one does not answer; those asked before it have gone back.
        """
        if self._round is not None:
            self.wait()
        deadline = Deadline.after(self.settings.timeout_s)
        return tuple(self._undone(replica, deadline) for replica in self._replicas)

    def close(self) -> None:
        """Abort a round that is not committed yet, and let go of everything. Waits for no engine that does not answer."""
        self._closing.set()
        last = self._last
        if last is not None and last.drive is not None and last.drive.step == "commit":
            futures.wait([last.outcome], LAST_COMMIT_S)
        for replica in self._replicas:
            replica.interrupt()
        self._driver.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._offers.close()
        for replica in self._replicas:
            replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive(self, current: _Round) -> Drive:
        made, settings = current.made, self.settings
        order = m.Open(
            publisher=self.name,
            version=current.version,
            structure=self._offers.structure,
            digests=None if made.lanes is None else lanes_to_bytes(made.lanes),
            offer=made.offer,
            verify=settings.verify,
            timeout_s=current.deadline.remaining_s() + settings.lease_s + MARGIN_S,
            kv_policy=settings.kv_policy,
        )
        return Drive(
            parts=current.parts,
            order=order,
            manifest=self._offers.manifest,
            quorum=len(self._replicas) if settings.quorum is None else settings.quorum,
            lease_s=settings.lease_s,
            deadline=current.deadline,
            pool=self._pool,
            on_staged=current.staged.set,
            closing=self._closing.is_set,
            meanwhile=lambda: self._look_for_strays(current),
        )

    def _look_for_strays(self, current: _Round) -> None:
        """End the round of a live offer whose parameters lie elsewhere by now. In the driver's thread, while ranks stage and the
        training loop waits for them."""
        current.strayed = self._offers.strayed(current.made.offer)
        if current.strayed is not None:
            raise RoundAborted(f"a frozen offer takes the place of the live one: {current.strayed}")

    def _run(self, current: _Round, drive: Drive) -> Report:
        missed, self._missed = self._missed, self._missed + 1
        try:
            drive.run()
        finally:
            if current.strayed is not None:
                self._missed = missed  # it was no round of its own: a frozen one follows
            if any(part.done for part in current.parts):
                self._labels.bind(current.version)
        self._missed = 0
        return self._report(current, drive, missed)

    def _report(self, current: _Round, drive: Drive, missed: int) -> Report:
        replicas = tuple(part.report() for part in current.parts)
        unchanged = all(part.unchanged for part in current.parts)
        return Report(
            version=current.version,
            mode=current.made.offer.mode,
            offer=current.made.offer.kind,
            verified=self.settings.verify and not unchanged,
            unchanged=unchanged,
            size_bytes=self._offers.size_bytes,
            total_s=time.monotonic() - current.began_s,
            freeze_s=current.made.freeze_s,
            digest_s=current.made.digest_s,
            vote_s=drive.vote_s,
            commit_s=drive.commit_s,
            replicas=replicas,
            staleness=missed,
        )

    def _release(self) -> None:
        """Wait a while for ranks that still read the offer before; after that they are revoked."""
        deadline = Deadline.after(self.settings.release_s)
        for part in [] if self._last is None else self._last.parts:
            if part.readers and part.round_id is not None:
                part.readers = _still_read(part.replica, part.round_id, deadline)

    def _undone(self, replica: Replica, deadline: Deadline) -> Version | None:
        try:
            return replica.undo(self.name, deadline).serving
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


def _still_read(replica: Replica, round_id: RoundId, deadline: Deadline) -> bool:
    try:
        return bool(replica.abort(round_id, "the source is needed", deadline))
    except ReplicaRefused:
        return False  # the round ended there
    except LiveWeightError:
        return True
