"""A training loop's calls to its engines between rounds: `fleet` (their state), `undo`, `catch_up` and `verify`.

Each call waits for the round that is under way, and raises that round's failure. Rounds themselves are RoundPublisher's (publisher.py).
"""

from __future__ import annotations

import time

from liveweight.errors import WrongState
from liveweight.rounds.fleet import Fleet, fleet_of, get_state
from liveweight.rounds.replica_progress import ReplicaProgress
from liveweight.rounds.report import Report
from liveweight.rounds.undo_and_verify import Verification, undo_replica, verify_replica
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from liveweight.trainer.publisher import RoundPublisher
from liveweight.trainer.round_record import PublisherRound


class FleetPublisher(RoundPublisher):
    """A RoundPublisher with the calls between rounds."""

    def undo(self) -> tuple[Version | None, ...]:
        """Take every engine that serves what was published last back to the version before, and say what each serves now.

        Those that are behind stay where they are: theirs is the version before. Raises RoundFailed where an engine refuses,
        OutcomeUnknown where one does not answer; those verifications before it have gone back.
        """
        if self._round is not None:
            self.wait()
        deadline = Deadline.after(self.settings.timeout_s)
        if self._published is None:
            return tuple(undo_replica(replica, self.name, deadline) for replica in self._replicas)
        published = self._published.replicas
        served = tuple(
            undo_replica(p.replica, self.name, deadline) if p.done else p.serves for p in published
        )
        self._numbered = tuple(one for one in served if one is not None and one.run == self.run)
        return served

    def fleet(self) -> Fleet:
        """Ask every engine how it is now: what it serves, whether it is behind, whether it was started anew. Raises nothing of theirs."""
        if self._round is not None:
            self.wait()
        deadline = Deadline.after(self.settings.timeout_s)
        states = list(self._pool.map(lambda replica: get_state(replica, deadline), self._replicas))
        published = None if self._published is None else self._published.version
        return fleet_of(self._replicas, states, published=published, boots=self._boots)

    def catch_up(self) -> Report | None:
        """Bring the engines that do not serve what was published last to it, without a new freeze: those that were left behind, and
        those that were started anew. None: there are none. RoundFailed where not one of them could be brought there.

        WrongState where it cannot be read any more: its offer was not frozen, or another one was made since.
        """
        found, published = self.fleet(), self._published
        if published is None or published is not self._last or published.made.offer.kind != "frozen":
            raise WrongState("without a frozen offer of what was published last", "catching up")
        late = [number for number, replica in enumerate(found.replicas) if replica.behind]
        if not late:
            return None
        progress = [
            ReplicaProgress(self._replicas[n], found.replicas[n].serving, boot=self._boots[n]) for n in late
        ]
        deadline = Deadline.after(self.settings.timeout_s)
        current = PublisherRound(published.version, published.made, progress, deadline, time.monotonic())
        coordinator = self._coordinator_of(current, quorum=1)
        try:
            coordinator.run()
        finally:
            self._record_replicas(dict(zip(late, progress, strict=True)))
        return self._report(current, coordinator, 0)

    def verify(self) -> Verification:
        """Compare what every engine's ranks hold now, digested anew, with the version that was published last.

        Engines that differ, and those of which it cannot be learned in time, are in the answer. WrongState where nothing was published,
        or what was has no digests: a live or ring offer that was not verified.
        """
        if self._round is not None:
            self.wait()
        published = self._published
        if published is None:
            raise WrongState("without a version that was published", "verify")
        manifest = self._offers.manifest_of(published.made)
        if manifest is None:
            raise WrongState(f"{published.version} was published without digests of it", "verify")
        deadline = Deadline.after(self.settings.timeout_s)
        verifications = [
            self._pool.submit(verify_replica, replica, manifest, deadline) for replica in self._replicas
        ]
        return Verification(version=published.version, replicas=tuple(one.result() for one in verifications))
