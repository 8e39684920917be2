"""Elastic recovery: an engine that loses a rank comes back by itself, at the version that it had, verified, or says how far behind."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.config import Restarts
from liveweight.engine.recovery.restart_budget import RestartBudget
from liveweight.engine.recovery.restarting_engine import GENERATION, RestartingEngine
from liveweight.engine.serving.rank_processes import RankProcess
from liveweight.engine.serving.requests import Delta
from liveweight.engine.serving.step_stream import weights_text
from liveweight.engine.status import RecoveryStatus
from liveweight.engine.updates.requested_update import RequestedVersion
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.errors import LiveWeightError, RankLost, RoundFailed, WeightsPending
from liveweight.lab.torture.faults import cut
from liveweight.lab.torture.leaks import kinds_of
from liveweight.observe.bus import Bus
from liveweight.observe.events import AnyEvent, Recovered, RecoveryBegan, RoundOpened
from liveweight.transports.snapshot.disk.store import Store
from tests.support.engine.elastic import Gate, kill, load, recovered, saved
from tests.support.engine.engines import WITHIN_S, Answer, Logits, Models, answers, ask, greedy
from tests.support.engine.versions import mixtures
from tests.support.processes.real_servers import until

Elastic = Callable[..., RestartingEngine]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [300, 20, 7, 7, 7, 100]]
KILLS, RESTARTS = 10, 5
CONNECTIONS = 16


def tokens_of(engine: Any) -> list[list[int]]:
    return [answer.ids for answer in answers(engine, PROMPTS, greedy(16))]


def held() -> Counter[str]:
    """The descriptors of this process, by kind, and its threads."""
    return kinds_of(os.getpid()) + Counter(threads=threading.active_count())


def recovery_of(engine: RestartingEngine) -> RecoveryStatus:
    found = engine.update_status().recovery
    assert found is not None
    return found


@pytest.mark.timeout(600)
def test_ranks_killed_under_load_ten_times_in_a_row_come_back_at_the_same_version(
    elastic: Elastic,
    start: Callable[..., Any],
    publisher: Any,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
) -> None:
    old, new = models.directory(), models.directory(seed=1)
    expected = tokens_of(start(new, tp=2))
    engine = elastic(old)
    version = publisher(engine, new).publish(1).version
    saved(engine, version)
    with load(engine) as asking:
        for number in range(1, KILLS + 1):
            asking.in_flight()
            kill(engine, number % 2)
            recovered(engine, number)
            assert engine.update_status().serving == version
            verdict = engine.verify(VerificationRequest()).verdict
            assert (verdict.match, verdict.digest) == (True, version.digest)
            assert tokens_of(engine) == expected
    assert (recovery_of(engine).origin, recovery_of(engine).behind) == ("snapshot", None)
    whole, failed = asking.ended()
    assert {type(error) for error in failed} == {RankLost}
    assert mixtures(whole, lambda _: transformers_logits(new)) == []
    assert {token.weights for _, answer in whole for token in answer.tokens} == {weights_text(version)}
    assert engine.status().counts.finished["error"] == len(failed)


def test_restarts_leave_no_descriptor_and_no_thread_behind(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    """Neither in the engine's process nor in its publisher's and its source's, which are here, too."""
    with lw.Publisher(
        models.directory(seed=2),
        address=f"ipc://{short_path}/source.sock",
        secret=short_path / "secret",
        directory=short_path / "source",
        dtype="float32",
    ) as source:
        source.offer("offered")
        engine = elastic(models.directory(), updates={"source": source.address})
        trainer = publisher(engine, models.directory(seed=1))

        def use(number: int) -> None:
            """Restart it, and let it do all that opens a connection."""
            kill(engine, 0)
            recovered(engine, number)
            assert engine.update_weights(RequestedVersion(call=f"call {number}")).version.label == "offered"
            trainer.publish(number)
            assert engine.verify(VerificationRequest()).verdict.match
            assert engine.verify(VerificationRequest(against="source")).verdict.match is False
            back = engine.undo(WITHIN_S)
            assert trainer.fleet().behind
            assert back is not None
            saved(engine, back)

        for number in (1, 2):  # both shadows are bound
            use(number)
        before = held()
        for number in range(3, 3 + RESTARTS):
            use(number)
        until(lambda: held() <= before, f"no more than {before} to be held; now it is {held()}")


def test_a_rank_that_was_cut_off_from_its_leader_is_replaced_also_when_nobody_asks(
    elastic: Elastic, publisher: Any, models: Models
) -> None:
    engine = elastic(models.directory())
    trainer = publisher(engine, models.directory(seed=1))
    version = trainer.publish(1).version
    saved(engine, version)
    pid = engine.pids[0]
    for number in range(CONNECTIONS):
        cut(pid, number)
    recovered(engine, 1)
    assert pid not in engine.pids
    assert engine.update_status().serving == version
    assert str(trainer.publish(2).version.label) == "2"


def test_a_replica_of_one_rank_and_a_tied_model_with_a_draft_come_back(
    elastic: Elastic, publisher: Any, models: Models
) -> None:
    engine = elastic(models.directory(mtp=True), tp=1)
    version = publisher(engine, models.directory(mtp=True, seed=1)).publish("step_1").version
    saved(engine, version)
    expected = tokens_of(engine)
    kill(engine, 0)
    recovered(engine, 1)
    assert engine.update_status().serving == version
    assert engine.verify(VerificationRequest()).verdict.digest == version.digest
    assert tokens_of(engine) == expected


def test_a_publisher_needs_no_restart_and_its_round_fails_by_name_if_a_rank_dies_in_it(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    victims: list[int] = []

    def on_event(event: AnyEvent) -> None:
        if isinstance(event, RoundOpened) and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    bus = Bus()
    bus.subscribe(on_event)
    engine = elastic(models.directory(), bus=bus)
    with_it = publisher(engine, models.directory(seed=1))
    version = with_it.publish(1).version
    saved(engine, version)
    victims.append(engine.pids[1])
    with pytest.raises(RoundFailed) as failed:
        with_it.publish(2)
    assert failed.value.code == "LW-205"
    recovered(engine, 1)
    assert engine.update_status().serving == version
    assert with_it.publish(3).version == engine.update_status().serving
    assert recovery_of(engine).behind is None
    del short_path


def test_start_weights_come_back_from_the_checkpoint_and_a_version_without_a_snapshot_is_said_to_be_missed(
    elastic: Elastic, publisher: Any, models: Models
) -> None:
    engine = elastic(models.directory(), snapshots={"every": 1000})
    expected = tokens_of(engine)
    kill(engine, 1)
    recovered(engine, 1)
    assert (recovery_of(engine).origin, recovery_of(engine).behind) == ("checkpoint", None)
    assert tokens_of(engine) == expected
    with_it = publisher(engine, models.directory(seed=1))
    version = with_it.publish(1).version
    kill(engine, 0)
    recovered(engine, 2)
    assert (recovery_of(engine).origin, recovery_of(engine).behind) == ("checkpoint", version)
    assert engine.update_status().serving == engine.start
    assert tokens_of(engine) == expected
    with_it.publish(2)
    assert recovery_of(engine).behind is None


@pytest.mark.parametrize("shadow", ["device", "none"])
def test_a_damaged_snapshot_is_named_and_the_older_one_serves(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path, shadow: str
) -> None:
    """In place, too, where a snapshot that turned out to be damaged half-way would have torn the ranks."""
    engine = elastic(models.directory(), updates={"shadow": shadow})
    first = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, first)
    expected = tokens_of(engine)
    second = publisher(engine, models.directory(seed=2)).publish(2).version
    saved(engine, second)
    parts = list(Store(short_path / "snapshots").newest().glob("*.pdparams"))
    for part in parts:
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    kill(engine, 0)
    recovered(engine, 1)
    found = recovery_of(engine)
    assert (engine.update_status().serving, found.origin, found.behind) == (first, "snapshot", second)
    assert "corrupted" in found.notes[0]
    assert any(part.name in found.notes[0] for part in parts)
    assert tokens_of(engine) == expected
    kill(engine, 1)
    recovered(engine, 2)
    assert (engine.update_status().serving, recovery_of(engine).behind) == (first, second)


def test_a_snapshot_without_its_files_is_passed_over(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path
) -> None:
    engine = elastic(models.directory())
    version = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, version)
    next(Store(short_path / "snapshots").newest().glob("*.pdparams")).unlink()
    kill(engine, 1)
    recovered(engine, 1)
    found = recovery_of(engine)
    assert (found.origin, found.behind) == ("checkpoint", version)
    assert "missing" in found.notes[0]


def test_a_rank_killed_while_it_writes_leaves_nothing_that_counts(
    elastic: Elastic, publisher: Any, models: Models, short_path: Path, gate: Gate
) -> None:
    engine = elastic(models.directory(), gate=gate)
    first = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, first)
    gate.shut()
    with_it = publisher(engine, models.directory(seed=2))
    second = with_it.publish(2).version
    gate.reached()
    kill(engine, 1)
    recovered(engine, 1)
    assert (engine.update_status().serving, recovery_of(engine).behind) == (first, second)
    saved(engine, with_it.publish(3).version)
    assert len(Store(short_path / "snapshots").complete()) == 2


@pytest.mark.parametrize("moment", ["starting", "restoring"])
def test_ranks_killed_during_the_recovery_are_replaced_in_their_turn(
    elastic: Elastic, publisher: Any, models: Models, moment: str
) -> None:
    victims: list[RankProcess] = []
    doomed = threading.Event()

    def started(rank: int, process: RankProcess) -> None:
        if rank == 1 and doomed.is_set():
            victims.append(process)
            if moment == "starting":
                doomed.clear()
                victims.pop().kill()

    def on_event(event: AnyEvent) -> None:
        if isinstance(event, RoundOpened) and victims:
            doomed.clear()
            victims.pop().kill()

    bus = Bus()
    bus.subscribe(on_event)
    engine = elastic(models.directory(), started=started, bus=bus)
    version = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, version)
    doomed.set()
    kill(engine, 0)
    recovered(engine, 2)
    assert (engine.update_status().serving, recovery_of(engine).behind) == (version, None)
    assert not doomed.is_set()


def test_a_newer_offer_of_the_source_goes_before_an_older_snapshot(
    elastic: Elastic, models: Models, short_path: Path
) -> None:
    with lw.Publisher(
        models.directory(seed=1),
        address=f"ipc://{short_path}/source.sock",
        secret=short_path / "secret",
        directory=short_path / "trainer",
        dtype="float32",
    ) as source:
        source.offer(7)
        engine = elastic(models.directory(), updates={"source": source.address}, snapshots={"every": 1000})
        version = engine.update_weights(RequestedVersion(call="test")).version
        expected = tokens_of(engine)
        kill(engine, 0)
        recovered(engine, 1)
        found = recovery_of(engine)
        serving = engine.update_status().serving
        assert serving is not None
        assert (serving.same_name(version), found.origin, found.behind) == (True, "offer", None)
        assert tokens_of(engine) == expected


def test_an_engine_that_is_started_anew_resumes_from_the_newest_snapshot(
    elastic: Elastic, publisher: Any, models: Models
) -> None:
    engine = elastic(models.directory())
    version = publisher(engine, models.directory(seed=1)).publish(1).version
    saved(engine, version)
    expected = tokens_of(engine)
    engine.stop()
    again = elastic(models.directory(), snapshots={"resume": True})
    assert again.update_status().serving == version
    assert tokens_of(again) == expected
    assert recovery_of(again).restarts == 0


def test_while_ranks_are_replaced_requests_are_refused_and_a_pause_outlasts_them(
    elastic: Elastic, models: Models
) -> None:
    seen: list[object] = []
    engines: list[RestartingEngine] = []

    def started(rank: int, process: RankProcess) -> None:
        del process
        if rank == 0 and engines:
            engine = engines[0]
            seen.extend([engine.status().state, engine.update_status().serving])
            with pytest.raises(WeightsPending, match="rank 1"):
                ask(engine, [5, 6], greedy(2))
            seen.append("refused")

    engine = elastic(models.directory(), started=started)
    engines.append(engine)
    before = Answer()
    number = engine.submit([5, 6, 7], greedy(2000), before.pieces.put)
    assert isinstance(before.piece(), Delta)
    engine.pause("keep", WITHIN_S)
    kill(engine, 1)
    recovered(engine, 1)
    assert seen == ["pending_weights", None, "refused"]
    with pytest.raises(RankLost, match="rank 1"):
        assert before.wait().finish
    assert engine.paused == "paused"
    answer = ask(engine, [5, 6], greedy(2))
    assert number < GENERATION
    engine.cancel(number)  # another request has its number by now
    assert engine.abort_requests([number]) == 0
    engine.resume()
    assert answer.wait().finish == "length"


def test_it_gives_up_after_a_few_starts_that_fail_and_says_why(
    elastic: Elastic, models: Models, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(models.directory(), model)
    said: list[AnyEvent] = []
    bus = Bus()
    bus.subscribe(said.append)
    engine = elastic(model, bus=bus)
    gone, faults = threading.Event(), list[LiveWeightError]()

    def on_failure(error: LiveWeightError) -> None:
        faults.append(error)
        gone.set()

    engine.on_failure(on_failure)
    (model / "model.safetensors").unlink()
    kill(engine, 0)
    assert gone.wait(WITHIN_S)
    assert str(faults[0]).startswith("gave up after 3 starts in a row that failed; the last: ")
    assert engine.status().state == "failed"
    with pytest.raises(RankLost):
        ask(engine, [5, 6], greedy(2))
    assert len([event for event in said if isinstance(event, RecoveryBegan)]) == 3
    assert not [event for event in said if isinstance(event, Recovered)]


def test_it_can_be_stopped_in_the_middle_of_a_recovery(elastic: Elastic, models: Models) -> None:
    held, processes = threading.Event(), list[RankProcess]()

    def started(rank: int, process: RankProcess) -> None:
        processes.append(process)
        if rank == 1 and len(processes) > 2:
            os.kill(process.pid, signal.SIGSTOP)  # it never comes to its start
            held.set()

    engine = elastic(models.directory(), started=started)
    kill(engine, 0)
    assert held.wait(WITHIN_S)
    engine.stop(30.0)
    assert [process.poll() for process in processes] == [0, 0, 0, 0]


def test_the_budget_counts_starts_in_a_row_and_within_a_time() -> None:
    cause = RankLost("rank 1 was killed")
    row = RestartBudget(Restarts(attempts=2, limit=10, wait_s=1.0))
    row.spend(0.0, cause)
    assert row.wait_s() == 0.0
    row.spend(0.0, cause)
    assert row.wait_s() == 1.0
    with pytest.raises(RankLost, match="2 starts in a row that failed; the last: rank 1 was killed"):
        row.spend(0.0, cause)
    often = RestartBudget(Restarts(limit=3, window_s=10.0))
    for now_s in (0.0, 1.0, 2.0):
        often.spend(now_s, cause)
        often.succeeded()
    with pytest.raises(RankLost, match="3 restarts within 5 s"):
        often.spend(5.0, cause)
    often.spend(10.5, cause)
    assert often.restarts == 4
