"""Prometheus metrics: the table of what is counted, and the reader that counts it.

Owns names, labels and buckets. The program gives the registry, and serves it.
Labels are few and bounded: round ids and peers never become labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

from liveweight.observe import events as ev

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row of the table; the operations page is checked against it."""

    name: str
    kind: Literal["counter", "histogram", "info"]
    labels: tuple[str, ...] = ()
    meaning: str


ROUNDS = Metric(
    name="liveweight_rounds_total",
    kind="counter",
    labels=("outcome",),
    meaning="rounds that ended, by outcome",
)
ROUND_SECONDS = Metric(
    name="liveweight_round_seconds",
    kind="histogram",
    labels=("outcome",),
    meaning="duration of rounds, from open to end",
)
FREEZE_SECONDS = Metric(
    name="liveweight_freeze_seconds",
    kind="histogram",
    meaning="how long a frozen offer held up one trainer rank",
)
STAGE_SECONDS = Metric(
    name="liveweight_stage_seconds",
    kind="histogram",
    meaning="how long one rank took to stage its share",
)
VERIFY_SECONDS = Metric(
    name="liveweight_verify_seconds",
    kind="histogram",
    labels=("scope",),
    meaning="how long verifying took, for one rank or for the replica",
)
STALL_SECONDS = Metric(
    name="liveweight_commit_stall_seconds",
    kind="histogram",
    labels=("scope",),
    meaning="how long decoding stood still for a commit or an undo, on one rank or in the replica",
)
BYTES = Metric(
    name="liveweight_bytes_total",
    kind="counter",
    labels=("step",),
    meaning="bytes copied by freezing and by staging",
)
OFFERS = Metric(
    name="liveweight_offers_total",
    kind="counter",
    labels=("kind",),
    meaning="versions that were offered, by kind of offer",
)
MODES_FAILED = Metric(
    name="liveweight_modes_failed_total",
    kind="counter",
    labels=("mode",),
    meaning="transfer modes that failed at a publisher that has another, which the next attempt used",
)
LEASES_EXPIRED = Metric(
    name="liveweight_leases_expired_total",
    kind="counter",
    meaning="ready replicas that received no decision in time",
)
AUDITS = Metric(
    name="liveweight_audits_total",
    kind="counter",
    labels=("match",),
    meaning="verifications of what a replica holds, by whether it was what it should be",
)
SNAPSHOTS = Metric(
    name="liveweight_snapshots_total",
    kind="counter",
    labels=("outcome",),
    meaning="snapshots that replicas began, by outcome: saved, left for newer weights, failed",
)
RECOVERIES = Metric(
    name="liveweight_recoveries_total",
    kind="counter",
    labels=("behind",),
    meaning="replicas that came back after a lost rank, by whether with an older version than they had",
)
PEERS_REFUSED = Metric(
    name="liveweight_peers_refused_total",
    kind="counter",
    labels=("code",),
    meaning="peers turned away by a channel, by error code",
)
VERSION = Metric(
    name="liveweight_version_info",
    kind="info",
    labels=("replica", "version"),
    meaning="the version that a replica serves; empty where none of ours serves or is known to",
)

METRICS = (
    ROUNDS,
    ROUND_SECONDS,
    FREEZE_SECONDS,
    STAGE_SECONDS,
    VERIFY_SECONDS,
    STALL_SECONDS,
    BYTES,
    OFFERS,
    MODES_FAILED,
    LEASES_EXPIRED,
    AUDITS,
    SNAPSHOTS,
    RECOVERIES,
    PEERS_REFUSED,
    VERSION,
)
"""Every metric there is, in the order of the operations page."""


_SNAPSHOT_OUTCOMES: dict[type[ev.Event], str] = {
    ev.SnapshotSaved: "saved",
    ev.SnapshotAbandoned: "left",
    ev.SnapshotFailed: "failed",
}


class MetricsReader:
    """Keeps the table's metrics in the registry that it is given. One reader per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Histogram, Info  # loaded by programs that keep metrics, only

        def rows(kind: str) -> list[Metric]:
            return [metric for metric in METRICS if metric.kind == kind]

        self._counters = {
            m.name: Counter(m.name, m.meaning, m.labels, registry=registry) for m in rows("counter")
        }
        self._histograms = {
            m.name: Histogram(m.name, m.meaning, m.labels, registry=registry, buckets=BUCKETS_S)
            for m in rows("histogram")
        }
        self._version = Info(
            VERSION.name.removesuffix("_info"), VERSION.meaning, ("replica",), registry=registry
        )

    def __call__(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.RoundEnded():
                self._ended(event)
            case ev.RankStaged():
                self._add(BYTES, event.size_bytes, "stage")
                self._observe(STAGE_SECONDS, event.took_s)
            case ev.SourceFrozen():
                self._add(BYTES, event.size_bytes, "freeze")
                self._observe(FREEZE_SECONDS, event.took_s)
            case ev.RankVerified():
                self._observe(VERIFY_SECONDS, event.took_s, _scope(event.rank))
            case ev.RoundCommitted() | ev.RoundUndone():
                rank = event.rank if isinstance(event, ev.RoundCommitted) else None
                self._observe(STALL_SECONDS, event.stall_s, _scope(rank))
            case ev.OfferMade():
                self._add(OFFERS, 1, event.kind)
            case ev.LeaseExpired():
                self._add(LEASES_EXPIRED, 1)
            case ev.Audited():
                self._add(AUDITS, 1, {True: "yes", False: "no", None: "unknown"}[event.match])
            case ev.SnapshotSaved() | ev.SnapshotAbandoned() | ev.SnapshotFailed():
                self._add(SNAPSHOTS, 1, _SNAPSHOT_OUTCOMES[type(event)])
            case ev.PeerRefused() | ev.Recovered() | ev.ModeFailed():
                self._add(*_counted(event))
            case ev.StagingBegan() | ev.OverwritingBegan() | ev.AuditBegan() | ev.FleetEvent():
                pass  # their outcome is counted, or part of the state
            case (
                ev.RoundOpened()
                | ev.VoteCast()
                | ev.RoundGivenUp()
                | ev.LiveOfferImpossible()
                | ev.BucketDamaged()
                | ev.ReadersRevoked()
                | ev.RecoveryBegan()
                | ev.KernelsChosen()
            ):
                pass  # RoundEnded counts the first three's rounds; the others are for the log
            case _:
                assert_never(event)

    def _ended(self, event: ev.RoundEnded) -> None:
        self._add(ROUNDS, 1, event.outcome)
        self._observe(ROUND_SECONDS, event.took_s, event.outcome)
        serving = "" if event.serving is None else event.serving
        self._version.labels(event.replica).info({"version": serving})

    def _add(self, metric: Metric, amount: float, *labels: str) -> None:
        counter = self._counters[metric.name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        histogram = self._histograms[metric.name]
        (histogram.labels(*labels) if labels else histogram).observe(seconds)


def _counted(event: ev.PeerRefused | ev.Recovered | ev.ModeFailed) -> tuple[Metric, int, str]:
    if isinstance(event, ev.PeerRefused):
        return PEERS_REFUSED, 1, event.code
    if isinstance(event, ev.ModeFailed):
        return MODES_FAILED, 1, event.mode
    return RECOVERIES, 1, "no" if event.behind is None else "yes"


def _scope(rank: int | None) -> str:
    return "replica" if rank is None else "rank"
