"""The publisher: what a training loop holds to send its weights to running engines.

Composes offers, replicas, and one coordinator (rounds/coordinator) per round, which runs in a background thread. `publish` returns when
the engines serve the version, or raises. It never hangs, and a failed round leaves the engines on the version that they served.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from typing import Self

from msgspec.structs import replace

from liveweight.errors import OutcomeUnknown, Refused, RoundAborted, RoundFailed, WrongState
from liveweight.rounds.coordinator import MARGIN_S, RoundCoordinator
from liveweight.rounds.replica import Replica
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.rounds.report import Report
from liveweight.rounds.undo_and_verify import may_still_read
from liveweight.spec.deadline import Deadline
from liveweight.spec.label import checked_label
from liveweight.spec.manifest import Version
from liveweight.spec.version_age import newest_of_run
from liveweight.trainer.labels import Labels
from liveweight.trainer.offers.port import OfferMaker
from liveweight.trainer.offers.pull_server import OfferedVersion, PullServer
from liveweight.trainer.offers.single_source import MadeOffer
from liveweight.trainer.round_record import PublisherRound, report_of
from liveweight.trainer.settings import GRACE_S, PublisherSettings, last_steps_s, patience_of
from liveweight.wire import messages as m
from liveweight.wire.host_identity import this_host

LAST_COMMIT_S = 5.0
"""How long closing waits for a commit that was already sent to the engines."""


class RoundPublisher:
    """Publishes one source's versions to replicas. Every method is for the training loop's thread. FleetPublisher adds `undo`, `verify`,
    `fleet` and `catch_up`."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        replicas: Sequence[Replica],
        offers: OfferMaker,
        settings: PublisherSettings,
        pull_server: PullServer | None = None,
        boots: Sequence[str | None] = (),
        served: Sequence[Version | None] = (),
    ) -> None:
        """`pull_server`: where engines may pull the offered version; then there may be no replica to drive. `boots`: the replicas'
        incarnations at the handshake; None for a replica that did not answer. `served`: what the replicas served then; of versions of
        this run, numbers go on after the highest."""
        self.name, self.run, self.settings = name, run, settings
        self._replicas, self._offers, self._pull_server = list(replicas), offers, pull_server
        self.engines = len(self._replicas)
        if settings.quorum is not None and not 1 <= settings.quorum <= len(self._replicas):
            raise Refused(f"a quorum of {settings.quorum} of {len(self._replicas)} replicas")
        self._labels = Labels()
        newest = newest_of_run(run, served)
        self._number = 0 if newest is None else newest.number or 0
        self._numbered: tuple[Version, ...] = () if newest is None else (newest,)
        """Versions that engines may serve: one that is offered again keeps its number."""
        self._offered: Version | None = None
        self._boots = list(boots) or [None] * len(self._replicas)
        self._last: PublisherRound | None = None
        self._published: PublisherRound | None = None
        self._round: PublisherRound | None = None
        self._missed = 0
        self._closing = threading.Event()
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="liveweight-driver")
        self._pool = ThreadPoolExecutor(max(1, len(self._replicas)), thread_name_prefix="liveweight-replica")

    def publish(self, label: str | int) -> Report:
        """Send the source's current weights as that version and wait until the engines serve it.

        A label is a text of 1 to 256 printable characters or an integer; LabelInvalid, at once, for anything else. Raises RoundFailed
        (the engines still serve what they served), VersionConflict for a label that stood for other content in this run,
        OutcomeUnknown where the engines' answer did not come in time.
        """
        self._check_engines()
        self.offer(label)
        return self.wait()

    def _check_engines(self) -> None:
        if not self._replicas:
            raise WrongState(
                "it has no engines (offer holds a version ready for engines that pull)", "publish"
            )

    def offer(self, label: str | int, *, readers: int = 1) -> Version:
        """Begin a round; returns as soon as the parameters may change: after the freeze; live or a ring, when all ranks have staged,
        or, of engines in place, when they have committed.

        With a source's address, engines may pull the version from now on, until the next offer or `close`. Engines that still read the
        version before get `release_s` to finish; then they are revoked, and their rounds fail and may be requested again. A label that
        an engine or a stream has begun to read stands for its content, where that is known (not of a ring): VersionConflict for other
        content under it. Without engines to drive, a live or ring offer stands until `readers` engines or streams have read all of it;
        one that breaks off does not count. DeadlineExceeded says how
        many have, if it was not all of them within the publisher's `timeout_s`. A frozen one does not wait.
        """
        if readers < 1 or (readers > 1 and self._replicas):
            raise Refused(
                f"readers={readers}: it is a number from 1, for a publisher without engines; named engines are counted as they stage"
            )
        if self._closing.is_set():
            raise WrongState("closed", "offer")
        label = checked_label(label)
        if self._round is not None:
            self.wait()  # an unwaited failure is raised here
        began_s = time.monotonic()
        version, made = self._make_offer(label)
        if not self._replicas:
            return self._wait_until_read(version, made, readers)
        try:
            current = self._begin_round(version, made, began_s)
            if made.offer.kind != "frozen":
                current.staged.wait(current.deadline.remaining_s() + self._last_steps_s())
        finally:  # also if we are interrupted: the parameters may change from here on
            self._offers.end(made.offer)
        if current.invalidated is not None:
            return self._freeze_instead(label, current, current.invalidated)
        return version

    def _make_offer(self, label: str | int) -> tuple[Version, MadeOffer]:
        """Make the offer and put it into the pull server, if there is one. If this raises, the pull server offers nothing."""
        settings, pull_server = self.settings, self._pull_server
        with nullcontext() if pull_server is None else pull_server.changing():
            if pull_server is not None and pull_server.leased and self._offered is not None:
                self._labels.bind(self._offered)  # whoever read it may serve it
            made = self._offers.make(
                str(label), settings.offer, verify=settings.verify, release=self._release
            )
            version = self._version_of(label, made)
            if pull_server is not None:
                described = self._offers.description()
                offered = OfferedVersion(
                    version=version,
                    structure=described.structure,
                    manifest=described.manifest,
                    digests=made.digests,
                    offer=made.offer,
                    kept=described.kept,
                )
                pull_server.put(offered)
                self._offered = version
        return version, made

    def _wait_until_read(self, version: Version, made: MadeOffer, readers: int) -> Version:
        """Without engines to drive: a live or ring offer stands until that many engines or streams have read it."""
        if self._pull_server is not None and made.offer.kind != "frozen":
            try:
                self._pull_server.wait_until_read(Deadline.after(self.settings.timeout_s), readers)
                self._release()
            finally:
                self._offers.end(made.offer)
        return version

    def _version_of(self, label: str | int, made: MadeOffer) -> Version:
        digest = None if made.lanes is None else self._offers.content.of(made.lanes)
        version = Version(run=self.run, label=label, digest=digest)
        self._labels.check(version)
        return self._with_number(version)

    def _with_number(self, version: Version) -> Version:
        """The version with its number: the next one, unless it was offered or published last, which only known content tells."""
        last = None if self._published is None else self._published.version
        for known in (*self._numbered, last):
            if known is not None and version.content_known and version == known:
                return known
        self._number += 1
        numbered: Version = replace(version, number=self._number)
        self._numbered = (numbered,)
        return numbered

    def _begin_round(self, version: Version, made: MadeOffer, began_s: float) -> PublisherRound:
        served = (
            [None] * len(self._replicas) if self._last is None else [p.serves for p in self._last.replicas]
        )
        parts = [
            ReplicaProgress(replica, serving, boot=boot)
            for replica, serving, boot in zip(self._replicas, served, self._boots, strict=True)
        ]
        # The round's time; the freeze before it waits for nobody but slow readers, and for them `release_s`.
        current = PublisherRound(version, made, parts, Deadline.after(self.settings.timeout_s), began_s)
        current.coordinator = coordinator = self._coordinator_of(current, quorum=self.settings.quorum)
        current.outcome = self._driver.submit(self._run, current, coordinator)
        current.outcome.add_done_callback(lambda _: current.staged.set())
        self._round = self._last = current
        return current

    def _freeze_instead(self, label: str | int, live: PublisherRound, reason: str) -> Version:
        """The parameters have moved: the round of the live offer was given up, and a round of a frozen offer takes its place."""
        self._round = None
        futures.wait([live.outcome], GRACE_S)
        made = self._offers.freeze(str(label), reason, release=self._release)
        return self._begin_round(self._version_of(label, made), made, live.began_s).version

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
        return last_steps_s(self.settings, len(self._replicas))

    def _record_replicas(self, parts: Mapping[int, ReplicaProgress]) -> None:
        """Record the final state of each replica, for `undo`, `verify` and `catch_up`."""
        for number, progress in parts.items():
            self._boots[number] = progress.boot
            if progress.done and self._published is not None:
                self._published.replicas[number] = progress

    def close(self) -> None:
        """Abort a round that is not committed yet, and release everything. Does not wait for engines that do not answer."""
        self._closing.set()
        last = self._last
        if last is not None and last.coordinator is not None and last.coordinator.step == "commit":
            overwritten = any(
                progress.in_place for progress in last.replicas
            )  # and torn, if the source went now
            left_s = last.deadline.remaining_s() + self._last_steps_s()
            futures.wait([last.outcome], left_s if overwritten else LAST_COMMIT_S)
        for replica in self._replicas:
            replica.interrupt()
        self._driver.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        if self._pull_server is not None:
            self._pull_server.close()
        self._offers.close()
        for replica in self._replicas:
            replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _coordinator_of(self, current: PublisherRound, *, quorum: int | None) -> RoundCoordinator:
        made, settings = current.made, self.settings
        order = m.Open(
            publisher=self.name,
            version=current.version,
            structure=self._offers.structure,
            digests=made.digests,
            offer=made.offer,
            verify=settings.verify,
            timeout_s=current.deadline.remaining_s() + settings.lease_s + MARGIN_S,
            kv_policy=settings.kv_policy,
            host=this_host(),
            pid=os.getpid(),
        )
        return RoundCoordinator(
            replicas=current.replicas,
            order=order,
            description=self._offers.description(),
            quorum=len(current.replicas) if quorum is None else quorum,
            patience=patience_of(settings, current.deadline),
            mark_behind=settings.behind == "stand_back",
            lease_s=settings.lease_s,
            deadline=current.deadline,
            pool=self._pool,
            on_staged=lambda: self._on_staged(current),
            on_read=current.staged.set,
            closing=self._closing.is_set,
            meanwhile=lambda: self._check_live_offer(current),
            poll=self._offers.poll,
        )

    def _on_staged(self, current: PublisherRound) -> bytes | None:
        """All ranks have staged. Returns the digests, if the round was opened without them. Runs in the driver's thread, before the
        parameters may change."""
        opened, current.made = current.made, self._offers.staged(current.made)
        return current.made.digests if opened.digests is None else None

    def _check_live_offer(self, current: PublisherRound) -> None:
        """Give up the round of a live offer whose parameters have moved. Runs in the driver's thread, while ranks stage and the training
        loop waits for them."""
        current.invalidated = self._offers.invalidated(current.made.offer)
        if current.invalidated is not None:
            raise RoundAborted(f"a frozen offer takes the place of the live one: {current.invalidated}")

    def _run(self, current: PublisherRound, coordinator: RoundCoordinator) -> Report:
        missed, self._missed = self._missed, self._missed + 1
        try:
            coordinator.run()
        except RoundFailed as error:
            raise self._offers.failed(error) from error.__cause__
        finally:
            if current.invalidated is not None:
                self._missed = missed  # this does not count as a failed round: a frozen one follows
            if any(progress.done for progress in current.replicas):
                self._labels.bind(current.version)
                self._published = current
            self._record_replicas(dict(enumerate(current.replicas)))
        self._missed = 0
        return self._report(current, coordinator, missed)

    def _report(self, current: PublisherRound, coordinator: RoundCoordinator, missed: int) -> Report:
        verify, size_bytes = self.settings.verify, self._offers.size_bytes
        return report_of(current, coordinator, verify=verify, size_bytes=size_bytes, missed=missed)

    def _release(self) -> None:
        """Wait up to `release_s` for ranks that still read the offer before; after that the caller revokes them."""
        deadline = Deadline.after(self.settings.release_s)
        for progress in [] if self._last is None else self._last.replicas:
            if progress.readers and progress.round_id is not None:
                progress.readers = may_still_read(progress.replica, progress.round_id, deadline)
        if self._pull_server is not None:
            self._pull_server.wait_for_readers(deadline)
