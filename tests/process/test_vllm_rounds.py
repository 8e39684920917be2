"""Rounds into workers of vLLM, without vLLM: what its calls are used for, and what each failure leaves. Real vLLM is in tests/vllm."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import liveweight as lw
from liveweight.errors import DeadlineExceeded, ManifestMismatch, Refused, RoundFailed, Torn, Unavailable
from liveweight.integrations.vllm.ways import FOUR, controls_of
from tests.support.vllm_workers import VllmWorkers, weights

BASE, NEW = weights(0), weights(1)
MET = ["init", "start", "finish"]
WHOLE = ["start", "pause keep", "update", "resume", "finish"]

Started = Callable[[int], VllmWorkers]


@pytest.fixture
def started(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """A vLLM of so many workers; all end with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    torch.set_num_threads(1)
    begun: list[VllmWorkers] = []

    def start(world: int) -> VllmWorkers:
        begun.append(VllmWorkers(world, short_path / "secret", BASE))
        return begun[-1]

    yield start
    for workers in begun:
        workers.close()


def publisher(workers: VllmWorkers, source: object = NEW, **settings: object) -> lw.Publisher:
    """One that drives these workers."""
    return lw.Publisher(source, engines=[lw.vllm(workers)], secret=workers.secret, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_workers_hold_what_was_published_and_undo_goes_back_to_the_start(
    started: Started, world: int
) -> None:
    vllm = started(world)
    with publisher(vllm) as trainer:
        trainer.publish("step_1")
        assert vllm.holds(NEW)
        assert vllm.rests()
        assert (vllm.version, vllm.paused) == ("step_1", False)
        assert vllm.calls == [*MET, *WHOLE]
        assert trainer.verify().match
        trainer.undo()
        assert vllm.holds(BASE)
        assert vllm.version == "initial"
        assert trainer.publish("step_1").unchanged is False
        assert vllm.holds(NEW)
        assert trainer.publish("step_1").unchanged


def test_versions_follow_each_other_and_layers_come_whole(started: Started) -> None:
    vllm = started(2)
    source = {name: tensor.clone() for name, tensor in BASE.items()}
    with publisher(vllm, source) as trainer:
        for step in range(2, 8):
            for name, tensor in weights(step).items():
                source[name].copy_(tensor)
            trainer.publish(step)
            assert vllm.holds(weights(step))
        trainer.undo()
        assert vllm.holds(weights(6))
    layers = [name.split(".")[2] for name in vllm.workers[0].order if "layers" in name]
    assert layers == sorted(layers, key=int)


@pytest.mark.parametrize(
    ("mode", "offer"),
    [("ipc", "frozen"), ("ipc", "live"), ("ipc", "ring"), ("gdr", "frozen"), ("ipc_snapshot", "frozen")],
)
def test_offers_of_every_kind_reach_the_workers(started: Started, mode: str, offer: str) -> None:
    vllm = started(2)
    with publisher(vllm, transfer_mode=mode, offer=offer, host="127.0.0.1") as trainer:
        trainer.publish(1)
    assert vllm.holds(NEW)


@pytest.mark.parametrize("after", [0, 5, 12])
def test_an_install_that_fails_on_one_worker_leaves_all_on_the_old_version(
    started: Started, after: int
) -> None:
    vllm = started(2)
    with publisher(vllm) as trainer:
        vllm.workers[1].failures = [after]
        with pytest.raises(RoundFailed, match="does not load") as failed:
            trainer.publish("bad")
        assert (failed.value.code, failed.value.rank) == (Unavailable.code, 1)
        assert vllm.holds(BASE)
        assert vllm.rests()
        assert (vllm.paused, vllm.version) == (False, "default")
        assert vllm.workers[1].restored == 1
        trainer.publish("good")
        assert vllm.holds(NEW)


def test_where_the_way_back_fails_vllm_stays_paused_and_the_error_says_so(started: Started) -> None:
    vllm = started(2)
    with publisher(vllm) as trainer:
        vllm.workers[1].failures = [3, 3]
        with pytest.raises(RoundFailed, match="stays paused") as failed:
            trainer.publish("torn")
        assert failed.value.code == Torn.code
        assert vllm.paused
        with pytest.raises(RoundFailed):
            trainer.publish("after")
        assert vllm.paused


def test_a_pause_that_is_refused_refuses_the_commit_and_changes_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = started(1)

    def refuse(_: str) -> None:
        raise RuntimeError("no pause today")

    with publisher(vllm) as trainer:
        with monkeypatch.context() as patched:
            patched.setattr(vllm, "pause_generation", refuse)
            with pytest.raises(RoundFailed, match="no pause today"):
                trainer.publish("refused")
        assert vllm.holds(BASE)
        assert vllm.rests()
        trainer.publish("granted")
        assert vllm.holds(NEW)


def test_a_pause_that_a_dead_trainer_left_is_ended_by_the_next_as_soon_as_it_meets_vllm(
    started: Started,
) -> None:
    vllm = started(1)
    vllm.active = vllm.paused = True
    with publisher(vllm) as trainer:
        assert (vllm.active, vllm.paused) == (False, False)
        trainer.publish(1)
    assert vllm.holds(NEW)


def test_a_trainer_never_pauses_without_an_update_that_tells_its_successor(started: Started) -> None:
    vllm = started(1)
    states: list[tuple[bool, bool]] = []
    vllm.on_call = lambda: states.append((vllm.paused, vllm.active))
    with publisher(vllm) as trainer:
        trainer.publish(1)
    assert (True, True) in states
    assert (True, False) not in states


def test_a_version_is_published_when_vllm_serves_it_and_not_when_it_has_ended_the_update(
    started: Started,
) -> None:
    vllm, published = started(1), threading.Event()

    def slowly() -> None:
        if vllm.calls[-2:] == ["resume", "finish"]:
            assert published.wait(60.0)  # vLLM takes a long step: it computes KV anew

    vllm.on_call = slowly
    with publisher(vllm) as trainer:
        trainer.publish(1)
        assert (vllm.version, vllm.paused, vllm.active) == ("1", False, True)
        published.set()
        trainer.undo()
        assert vllm.holds(BASE)
    assert vllm.calls == [*MET, *WHOLE, *WHOLE]


def test_an_update_whose_end_fails_is_ended_when_vllm_is_met_again(started: Started) -> None:
    vllm = started(1)

    def fail_once() -> None:
        if vllm.calls[-2:] == ["resume", "finish"]:
            vllm.on_call = lambda: None
            raise ConnectionError("the end was lost")

    vllm.on_call = fail_once
    with publisher(vllm) as trainer:
        trainer.publish(1)
        trainer.undo()
        assert vllm.holds(BASE)
        assert vllm.rests()
        assert not vllm.paused


def test_a_client_that_cannot_name_versions_has_said_it_when_publish_returns(started: Started) -> None:
    vllm = started(1)
    with lw.Publisher(NEW, engines=[lw.vllm(Four(vllm))], secret=vllm.secret) as trainer:
        trainer.publish(1)
        assert (vllm.version, vllm.active) == ("1", False)
        assert vllm.calls == [*MET, "start", "update", "finish"]


class Four:
    """The four methods of vLLM's own clients, and no more."""

    def __init__(self, workers: VllmWorkers) -> None:
        for name in FOUR:
            setattr(self, name, getattr(workers, name))


def test_an_engine_that_was_committed_and_not_resumed_is_asked_again_and_resumed(started: Started) -> None:
    vllm = started(1)
    with publisher(vllm) as trainer:
        vllm.resumes_refused = 1
        assert trainer.publish(1).replicas[0].committed
        assert vllm.holds(NEW)
        assert vllm.rests()
        assert not vllm.paused
        assert vllm.resumes_refused == 0


def test_an_update_of_somebody_else_refuses_the_commit_and_is_looked_after_next_time(
    started: Started,
) -> None:
    vllm = started(1)
    with publisher(vllm) as trainer:
        vllm.active = True
        with pytest.raises(RoundFailed, match="already active"):
            trainer.publish("refused")
        assert vllm.holds(BASE)
        trainer.publish("granted")
        assert vllm.holds(NEW)
        assert vllm.rests()
        assert not vllm.paused


def test_a_vote_whose_lease_is_over_when_vllm_stands_still_resumes_it(started: Started) -> None:
    vllm = started(1)
    late = threading.Event()

    def slowly() -> None:
        if vllm.calls[-1] == "pause keep":
            late.wait(4.0)  # longer than the lease

    vllm.on_call = slowly
    with publisher(vllm) as trainer:
        trainer.settings, patient = replace(trainer.settings, lease_s=2.0), trainer.settings
        with pytest.raises(RoundFailed) as failed:
            trainer.publish("late")
        assert failed.value.code == DeadlineExceeded.code
        assert vllm.holds(BASE)
        assert vllm.rests()
        assert not vllm.paused
        late.set()
        trainer.settings = patient
        trainer.publish("in time")
        assert vllm.holds(NEW)


def test_an_update_call_that_never_reaches_the_workers_fails_the_round_in_time(started: Started) -> None:
    vllm = started(2)

    def lost() -> None:
        raise ConnectionError("the call was lost")

    with publisher(vllm) as trainer:
        trainer.settings, patient = replace(trainer.settings, timeout_s=10.0, lease_s=10.0), trainer.settings
        vllm.on_update = lost
        with pytest.raises(RoundFailed, match="stays paused") as failed:
            trainer.publish("lost")
        assert "rank 0, 1" in str(failed.value)
        assert vllm.holds(BASE)
        vllm.on_update, trainer.settings = lambda: None, patient
        trainer.publish("found")
        assert vllm.holds(NEW)
        assert not vllm.paused


def test_damage_in_the_hosts_arena_is_found_by_the_rank_that_staged_it(started: Started) -> None:
    vllm = started(2)
    with publisher(vllm, NEW) as trainer:
        trainer.publish(1)
        memory = vllm.ranks[0]._target.live()[0]
        memory.bytes()[7] ^= 1
        found = trainer.verify()
        assert not found.match
        assert "rank" in str(found)


def test_a_second_trainer_finds_the_leader_of_the_first_gone_and_takes_over(started: Started) -> None:
    vllm = started(2)
    with publisher(vllm) as trainer:
        trainer.publish(1)
    with publisher(vllm, BASE) as other:
        other.publish(1)
        assert vllm.holds(BASE)
    with publisher(vllm) as trainer:
        trainer.publish(1)
    assert vllm.holds(NEW)


def test_workers_that_are_met_again_at_the_same_address_go_by_the_new_trainers_pace(
    started: Started, short_path: Path
) -> None:
    vllm, address = started(2), f"ipc://{short_path}/worker-0.sock"
    for seed, pace in enumerate((1e9, None, 5e8)):
        engine = lw.vllm(vllm, address=address, pace_bytes_per_s=pace)
        with lw.Publisher(weights(seed), engines=[engine], secret=vllm.secret) as trainer:
            trainer.publish(1)
        assert vllm.holds(weights(seed))
        assert {rank.pace_bytes_per_s for rank in vllm.ranks} == {pace}


def test_tensors_that_the_checkpoint_has_not_are_refused_by_name(started: Started) -> None:
    vllm = started(1)
    with (
        pytest.raises(ManifestMismatch, match=r"model\.more unexpected"),
        publisher(vllm, {**NEW, "model.more": torch.zeros(1)}),
    ):
        pass
    assert vllm.calls == MET


def test_kv_of_two_versions_is_never_mixed(started: Started) -> None:
    vllm = started(1)
    with publisher(vllm, kv_policy="reuse") as trainer, pytest.raises(RoundFailed, match="reuse"):
        trainer.publish(1)
    with publisher(vllm, kv_policy="drop") as trainer:
        trainer.publish(1)
    assert "pause abort" in vllm.calls


def test_what_is_no_vllm_is_refused() -> None:
    with pytest.raises(Refused, match="start_weight_update"):
        controls_of(object(), key=None, loop=None)
    with pytest.raises(Refused, match="is no URL of a vLLM"):
        controls_of("127.0.0.1:8000", key=None, loop=None)
