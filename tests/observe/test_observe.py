"""Events, the bus, and the readers: each reader gets every event, and none can harm the emitter."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from liveweight.errors import DeadlineExceeded
from liveweight.observe import events as ev
from liveweight.observe.bus import Bus, Recorder
from liveweight.observe.log import line_of, log
from liveweight.observe.metrics import METRICS, MetricsReader
from tests.arch.source_tree import ROOT

LONG_S = 30.0

KERNELS = ev.KernelsChosen(name="numpy", reason="no compiler at install time")


def examples() -> Iterator[ev.AnyEvent]:
    """At least one of each event, and one for each answer that a reader gives."""
    yield ev.RoundOpened(replica="a", round="b7.3.p", version="step_2", serving="step_1")
    yield ev.RoundOpened(replica="a", round="b7.1.p", version="step_2", serving=None)
    yield ev.StagingBegan(replica="a", round="b7.3.p", version="step_2", rank=0)
    yield ev.OverwritingBegan(replica="a", round="b7.3.p", version="step_2", rank=0)
    yield ev.RankStaged(replica="a", round="b7.3.p", version="step_2", rank=0, size_bytes=640, took_s=0.5)
    for rank in (None, 0):
        yield ev.RankVerified(replica="a", round="b7.3.p", version="step_2", rank=rank, took_s=0.25)
        yield ev.VoteCast(replica="a", round="b7.3.p", version="step_2", rank=rank, lease_s=10.0)
        yield ev.RoundCommitted(replica="a", round="b7.3.p", version="step_2", rank=rank, stall_s=0.002)
    yield ev.VoteCast(replica="a", round="b7.3.p", version="step_2", lease_s=10.0, objection="rank 1 is gone")
    yield ev.RoundGivenUp(
        replica="a", round="b7.3.p", version="step_2", rank=1, step="stage", code="LW-301", reason="stopped"
    )
    yield ev.RoundUndone(replica="a", round="b7.4.p", version="step_2", serving="step_1", stall_s=0.002)
    yield ev.LeaseExpired(replica="a", round="b7.3.p", version="step_2", lease_s=10.0)
    for outcome in ev.RoundOutcome:
        yield ended(outcome)
    yield ev.AuditBegan(replica="a", rank=1)
    for match in (True, False, None):
        yield audited(match)
    yield ev.OfferMade(version="step_2", kind="frozen", tensors=3, size_bytes=640)
    yield ev.SourceFrozen(version="step_2", rank=0, size_bytes=640, took_s=0.125)
    yield ev.ReadersRevoked(readers=("engine, asked by operator/1",), waited_s=5.0)
    yield ev.LiveOfferImpossible(version="step_2", reason="w is float32, the engine wants bfloat16")
    yield ev.ModeFailed(mode="gdr", code="LW-205", reason="the source is gone", following="ipc_snapshot")
    yield ev.BucketDamaged(bucket=3, tensor="w")
    yield ev.SnapshotSaved(replica="a", version="step_2", path="/s/000001-step_2", size_bytes=640, took_s=0.5)
    yield ev.SnapshotAbandoned(replica="a", version="step_2")
    yield ev.SnapshotFailed(replica="a", version="step_2", code="LW-503", reason="no space")
    yield ev.RecoveryBegan(replica="a", reason="rank 1 was killed by signal 9")
    for behind in (None, "step_2"):
        yield ev.Recovered(
            replica="a", version="step_1", origin="snapshot", behind=behind, notes=("damaged",), took_s=2.0
        )
    yield ev.VersionConfirmed(replica="a", version="step_2")
    yield ev.MarkedBehind(replica="a", version="step_2", reason="rank 1 did not stage in time")
    yield ev.PeerRefused(code="LW-202", reason="no proof of the secret")
    yield KERNELS
    yield ev.KernelsChosen(name="native")


def ended(outcome: ev.RoundOutcome, serving: str | None = "step_2", verified: bool = True) -> ev.RoundEnded:
    return ev.RoundEnded(
        replica="a",
        round="b7.3.p",
        version="step_2",
        outcome=outcome,
        took_s=1.0,
        verified=verified,
        serving=serving,
    )


def audited(match: bool | None) -> ev.Audited:
    differing = ("w", "norm") if match is False else ()
    return ev.Audited(
        replica="a", serving="step_2", match=match, differing=differing, count=len(differing), took_s=0.25
    )


def concrete(kind: type[ev.Event]) -> set[type[ev.Event]]:
    """The leaves of the event classes, by name: `__subclasses__` also holds the unslotted twins of slotted ones."""
    found = [value for value in vars(ev).values() if isinstance(value, type) and issubclass(value, kind)]
    return {c for c in found if not any(issubclass(other, c) for other in found if other is not c)}


def test_the_closed_set_holds_every_event() -> None:
    assert set(get_args(ev.AnyEvent)) == concrete(ev.Event)
    assert set(get_args(ev.AnyStep)) == concrete(ev.RoundEvent)


def test_the_examples_of_these_tests_hold_every_event() -> None:
    assert {type(event) for event in examples()} == set(get_args(ev.AnyEvent))


@pytest.mark.parametrize("kind", get_args(ev.AnyEvent), ids=lambda kind: str(kind.__name__))
def test_events_are_frozen_slotted_and_keyword_only(kind: type[ev.Event]) -> None:
    event = next(event for event in examples() if type(event) is kind)
    fields = dataclasses.fields(event)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, fields[0].name, "other")
    assert not hasattr(event, "__dict__")
    assert all(field.kw_only for field in fields)
    assert dataclasses.replace(event) == event
    assert hash(dataclasses.replace(event)) == hash(event)


def test_every_reader_hears_every_event_in_order() -> None:
    bus, first, second = Bus(), Recorder(), Recorder()
    bus.subscribe(first)
    bus.subscribe(second)
    emitted = tuple(examples())
    for event in emitted:
        bus.emit(event)
    assert first.events == second.events == emitted
    assert first.of(ev.KernelsChosen) == (KERNELS, ev.KernelsChosen(name="native"))


def test_a_bus_without_readers_takes_events() -> None:
    Bus().emit(KERNELS)


def test_a_closed_subscription_hears_nothing_and_closes_twice() -> None:
    bus, gone, stays = Bus(), Recorder(), Recorder()
    bus.subscribe(stays)
    with bus.subscribe(gone) as subscription:
        bus.emit(KERNELS)
    bus.emit(KERNELS)
    subscription.close()
    bus.emit(KERNELS)
    assert (len(gone.events), len(stays.events)) == (1, 3)


def test_a_reader_subscribed_twice_leaves_one_place_at_a_time() -> None:
    bus, recorder = Bus(), Recorder()
    first = bus.subscribe(recorder)
    bus.subscribe(recorder)
    bus.emit(KERNELS)
    first.close()
    bus.emit(KERNELS)
    assert len(recorder.events) == 3


def test_a_reader_that_leaves_while_it_hears_disturbs_nobody() -> None:
    bus, after = Bus(), Recorder()
    received: list[ev.AnyEvent] = []

    def leave(event: ev.AnyEvent) -> None:
        received.append(event)
        subscription.close()

    subscription = bus.subscribe(leave)
    bus.subscribe(after)
    bus.emit(KERNELS)
    bus.emit(KERNELS)
    assert (len(received), len(after.events)) == (1, 2)


def test_a_reader_that_raises_harms_neither_emitter_nor_readers_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: ev.AnyEvent) -> None:
        raise ValueError(event)

    bus, after = Bus(), Recorder()
    bus.subscribe(broken)
    bus.subscribe(after)
    for _ in range(3):
        bus.emit(KERNELS)
    assert len(after.events) == 3
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "broken" in record.getMessage()
    assert "KernelsChosen" in record.getMessage()

    bus.subscribe(broken)  # another place, another complaint
    bus.emit(KERNELS)
    assert len(caplog.records) == 2


def test_a_reader_cannot_swallow_an_interrupt() -> None:
    def interrupted(_: ev.AnyEvent) -> None:
        raise KeyboardInterrupt

    bus = Bus()
    bus.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(KERNELS)


def test_no_event_is_lost_between_threads() -> None:
    bus, recorder = Bus(), Recorder()
    bus.subscribe(recorder)
    start = threading.Barrier(4)

    def say(rank: int) -> None:
        start.wait(LONG_S)
        for size in range(200):
            with bus.subscribe(Recorder()):
                bus.emit(ev.SourceFrozen(version="v", rank=rank, size_bytes=size, took_s=0.0))

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    received = recorder.of(ev.SourceFrozen)
    assert len(received) == 800
    for rank in range(4):
        assert [event.size_bytes for event in received if event.rank == rank] == list(range(200))


def test_a_recorder_waits_for_a_moment_that_another_thread_brings() -> None:
    bus, recorder = Bus(), Recorder()
    bus.subscribe(recorder)
    looked = threading.Event()

    def is_kernels(event: ev.AnyEvent) -> bool:
        looked.set()
        return event == KERNELS

    def say() -> None:
        looked.wait(LONG_S)
        bus.emit(KERNELS)

    bus.emit(ev.KernelsChosen(name="native"))
    thread = threading.Thread(target=say)
    thread.start()
    assert recorder.wait_for(is_kernels, LONG_S) == KERNELS
    thread.join(LONG_S)


def test_a_recorder_finds_a_moment_that_has_passed() -> None:
    recorder = Recorder()
    recorder(KERNELS)
    assert recorder.wait_for(lambda event: event == KERNELS, 0.0) == KERNELS


def test_a_recorders_wait_ends_and_says_what_it_waited_for() -> None:
    recorder = Recorder()
    recorder(KERNELS)
    with pytest.raises(DeadlineExceeded, match="for rank 1 to stage") as caught:
        recorder.wait_for(lambda _: False, 0.01, waiting_for="rank 1 to stage")
    assert caught.value.waited_s >= 0.01


def test_every_event_has_one_line_of_its_own() -> None:
    emitted = list(examples())
    lines = [line_of(event)[1] for event in emitted]
    assert all(line and "\n" not in line for line in lines)
    assert len(set(lines)) == len(emitted)


LINES: list[tuple[ev.AnyEvent, int, str]] = [
    (KERNELS, logging.WARNING, "numpy kernels, slower than native ones: no compiler at install time"),
    (
        ev.RankStaged(replica="a", round="b7.3.p", version="step_2", rank=0, size_bytes=640, took_s=0.5),
        logging.DEBUG,
        "a rank 0, round b7.3.p: staged 640 bytes of step_2 in 0.500 s",
    ),
    (
        ev.RoundCommitted(replica="a", round="b7.3.p", version="step_2", stall_s=0.002),
        logging.INFO,
        "a, round b7.3.p: committed step_2, decoding stood still for 0.002 s",
    ),
    (
        ended(ev.RoundOutcome.COMMITTED, verified=False),
        logging.INFO,
        "a, round b7.3.p: committed after 1.000 s, not verified, serving step_2",
    ),
    (
        ended(ev.RoundOutcome.TORN, serving=None),
        logging.ERROR,
        "a, round b7.3.p: torn after 1.000 s, serving no version of ours",
    ),
]


@pytest.mark.parametrize(("event", "level", "text"), LINES)
def test_the_log_says(event: ev.AnyEvent, level: int, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "liveweight")
    log(event)
    assert caplog.record_tuples == [("liveweight", level, text)]


def test_a_percent_sign_in_a_name_does_not_break_the_line(caplog: pytest.LogCaptureFixture) -> None:
    log(ev.LiveOfferImpossible(version="100%s", reason="why"))
    assert "100%s" in caplog.text


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry in which the metrics reader has received all the examples."""
    registry = CollectorRegistry()
    reader = MetricsReader(registry)
    for event in examples():
        reader(event)
    return registry


SAMPLES: list[tuple[str, dict[str, str], float]] = [
    *(("liveweight_rounds_total", {"outcome": str(outcome)}, 1) for outcome in ev.RoundOutcome),
    ("liveweight_round_seconds_sum", {"outcome": "aborted"}, 1.0),
    ("liveweight_freeze_seconds_sum", {}, 0.125),
    ("liveweight_stage_seconds_sum", {}, 0.5),
    ("liveweight_verify_seconds_count", {"scope": "rank"}, 1),
    ("liveweight_verify_seconds_sum", {"scope": "replica"}, 0.25),
    ("liveweight_commit_stall_seconds_count", {"scope": "rank"}, 1),
    ("liveweight_commit_stall_seconds_count", {"scope": "replica"}, 2),
    ("liveweight_commit_stall_seconds_bucket", {"scope": "rank", "le": "0.003"}, 1),
    ("liveweight_commit_stall_seconds_bucket", {"scope": "rank", "le": "0.001"}, 0),
    ("liveweight_bytes_total", {"step": "stage"}, 640),
    ("liveweight_bytes_total", {"step": "freeze"}, 640),
    ("liveweight_offers_total", {"kind": "frozen"}, 1),
    ("liveweight_modes_failed_total", {"mode": "gdr"}, 1),
    ("liveweight_leases_expired_total", {}, 1),
    *(("liveweight_audits_total", {"match": match}, 1) for match in ("yes", "no", "unknown")),
    ("liveweight_peers_refused_total", {"code": "LW-202"}, 1),
    ("liveweight_version_info", {"replica": "a", "version": "step_2"}, 1),
]


@pytest.mark.parametrize(("name", "labels", "value"), SAMPLES)
def test_a_metric_counts(
    registry: CollectorRegistry, name: str, labels: dict[str, str], value: float
) -> None:
    assert registry.get_sample_value(name, labels) == value


def test_the_registry_holds_exactly_the_tables_metrics_and_labels(registry: CollectorRegistry) -> None:
    kept = {}
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        kept[family.name + suffix] = (family.type, family.documentation, labels)
    assert kept == {m.name: (m.kind, m.meaning, set(m.labels)) for m in METRICS}


def test_a_new_version_replaces_the_old_one_and_a_torn_replica_has_none() -> None:
    registry = CollectorRegistry()
    reader = MetricsReader(registry)

    def versions() -> list[str]:
        families = [f for f in registry.collect() if f.name == "liveweight_version"]
        return [sample.labels["version"] for family in families for sample in family.samples]

    seen = []
    for outcome, serving in [("committed", "step_1"), ("committed", "step_2"), ("torn", None)]:
        reader(ended(ev.RoundOutcome(outcome), serving=serving))
        seen.append(versions())
    assert seen == [["step_1"], ["step_2"], [""]]


def test_two_readers_in_two_registries_do_not_meet(registry: CollectorRegistry) -> None:
    other = CollectorRegistry()
    MetricsReader(other)
    assert other.get_sample_value("liveweight_leases_expired_total") == 0
    assert registry.get_sample_value("liveweight_leases_expired_total") == 1


def test_the_operations_page_lists_exactly_the_metrics() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `liveweight_")]
    assert rows == [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.meaning} |"
        for m in METRICS
    ]


def test_prometheus_is_loaded_by_the_metrics_reader_alone() -> None:
    modules = ", ".join(f"liveweight.observe.{name}" for name in ("events", "bus", "log", "metrics"))
    code = f"import sys, {modules}; raise SystemExit('prometheus_client' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, check=True, timeout=60
    )
