"""One interface for a trainer of one process and for one rank of several: the same calls, by the same names.

Chooses between them when it is built, and refuses calls of two threads at once. With one process
it is the publisher itself; with several ranks it forwards to RankZero or OtherRank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from liveweight.errors import Refused
from liveweight.rounds.fleet import Fleet
from liveweight.rounds.one_thread import ExclusiveCalls, exclusive
from liveweight.rounds.report import Report
from liveweight.rounds.undo_and_verify import Verification
from liveweight.spec.manifest import Version
from liveweight.trainer.fleet_publisher import FleetPublisher
from liveweight.trainer.offers.transfer_fallback import TransferFallback
from liveweight.trainer.sources.gathering_source import ensure_pass, run_to_end
from liveweight.trainer.sources.one_shot_source import NamedTensors, OneShotSource, as_pass
from liveweight.trainer.sources.tensors import AnyTensor
from liveweight.trainer.spmd.other_rank import OtherRank
from liveweight.trainer.spmd.rank_zero import RankZero


class SpmdPublisher(FleetPublisher):
    """Every method but `close` is for one thread at a time: while one runs, another thread's call raises WrongState, which names it. With a
    group, all ranks call them in the same order."""

    _calls: ExclusiveCalls
    _ranked: RankZero | OtherRank | None = None
    _fallback: TransferFallback | None = None
    _source: object = None

    def publish(self, label: str | int, *, tensors: NamedTensors | None = None) -> Report:
        """Send the current weights as that version and wait until the engines serve it.

        A label is a text of 1 to 256 printable characters or an integer; LabelInvalid, at once, for anything else. Raises RoundFailed
        (the engines still serve what they served), VersionConflict for a label that stood for other content in this run,
        OutcomeUnknown where the engines' answer, or rank 0's, did not come in time. `tensors`: see `offer`.
        """
        with _run_to_end(tensors) as given, self._calls.running("publish"):
            if self._ranked is None:
                self._check_engines()
            self.offer(label, tensors=given)
            return self.wait()

    def offer(self, label: str | int, *, readers: int = 1, tensors: NamedTensors | None = None) -> Version:
        """Begin a round; returns as soon as the parameters of this process may change: after the freeze, or, live, when all have staged.

        With a source's address, engines may pull the version from now on, until the next offer or `close`. With a group, the version's
        digest is known when all ranks have frozen their shards: the report has it.

        Without engines, a live or ring offer stands until `readers` engines or streams have read it. DeadlineExceeded says how many have,
        if it was not all of them within the publisher's `timeout_s`.

        `tensors` is for a publisher without a model, and needed there: an iterator of (name, tensor), in any order. Each tensor is copied
        before the next one is asked for, and not kept. A tied tensor may come under one of its names, or under several with the same
        content. The iterator is run to its end whatever happens. ManifestMismatch names what is missing, unexpected, or of a shape or dtype
        that does not fit; ManifestInvalid, what came twice or has no bytes.
        """
        with _run_to_end(tensors) as given, self._calls.running("offer"):
            if isinstance(self._source, OneShotSource):
                self._source.hand_over(given)
            elif given is not None:
                raise Refused("tensors= is for a publisher without a model: this one publishes its model")
            if self._ranked is not None:
                if readers != 1:
                    raise Refused(
                        "readers is for a publisher without engines, and a trainer of several ranks drives its own"
                    )
                return self._ranked.offer(label)
            with ensure_pass(self._source):
                return super().offer(label, readers=readers)

    @exclusive
    def wait(self) -> Report:
        """The outcome of the round that `offer` began; with a group, rank 0's, on every rank."""
        return super().wait() if self._ranked is None else self._ranked.wait()

    @exclusive
    def undo(self) -> tuple[Version | None, ...]:
        """Take every engine back to the version before, and say what each serves now. With a group: on rank 0 alone."""
        return super().undo() if self._ranked is None else self._ranked.undo()

    @exclusive
    def verify(self) -> Verification:
        """Compare what every engine's ranks hold now with the version that was published last. With a group: on rank 0 alone."""
        return super().verify() if self._ranked is None else self._ranked.verify()

    @exclusive
    def fleet(self) -> Fleet:
        """Ask every engine how it is now, and whether it is behind. With a group: on rank 0 alone."""
        return super().fleet() if self._ranked is None else self._ranked.fleet()

    @exclusive
    def catch_up(self) -> Report | None:
        """Bring engines that are behind to what was published last. None: there are none. With a group: on rank 0 alone, before the
        others offer again."""
        return super().catch_up() if self._ranked is None else self._ranked.catch_up()

    def close(self) -> None:
        """Abort a round that is not committed yet, and release everything. Another thread may call it while a round is waited for: the
        round is aborted. Not at a rank other than 0, where it raises WrongState then: its channel is for one thread."""
        if isinstance(self._ranked, OtherRank):
            with self._calls.running("close"):
                self._ranked.close()
            return
        if self._ranked is not None:
            self._ranked.close()
            return
        super().close()
        if self._fallback is not None:
            self._fallback.close()


@contextmanager
def _run_to_end(tensors: NamedTensors | None) -> Iterator[Iterator[tuple[str, AnyTensor]] | None]:
    """The iterator that was given, if any; run to its end on leaving, also if this thread may not call the publisher now."""
    if tensors is None:
        yield None
        return
    given = as_pass(tensors)
    with run_to_end(lambda: given):
        yield given
