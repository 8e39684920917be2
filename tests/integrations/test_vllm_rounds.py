"""Rounds into workers of vLLM, without vLLM: what its calls are used for, and what each failure leaves. Real vLLM is in tests/vllm."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import liveweight as lw
from liveweight.errors import (
    DigestMismatch,
    KeptDiffers,
    ManifestMismatch,
    Refused,
    RoundFailed,
    Torn,
    Unavailable,
)
from liveweight.integrations.vllm.client.connect import connect
from tests.support.vllm_workers import BASE, MET, NEW, WHOLE, Started, publisher, weights


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


def test_what_a_worker_computes_with_is_read_back_where_it_can_be(started: Started) -> None:
    vllm = started(2)
    with publisher(vllm, NEW) as trainer:
        trainer.publish(1)
        (found,) = trainer.verify().replicas
        assert (found.match, found.read) == (True, "staged")
        assert found.verdict is not None
        assert found.verdict.unread == 1  # the head
        vllm.workers[1].holds["model.layers.2.k.weight"][3, 4] += 1
        (found,) = trainer.verify().replicas
        assert found.match is False
        assert found.verdict is not None
        assert [(one.name, one.ranks) for one in found.verdict.mismatches] == [
            ("model.layers.2.k.weight", (1,))
        ]
        trainer.undo()
        trainer.publish(1)
        assert trainer.verify().match


def test_a_commit_that_looks_at_what_is_installed_fails_where_that_differs(started: Started) -> None:
    vllm = started(2)
    engine = lw.vllm(vllm, verify="installed")
    with lw.Publisher(NEW, engines=[engine], secret=vllm.secret) as trainer:
        vllm.workers[1].spoils = 1
        with pytest.raises(RoundFailed, match=r"model\.scale") as failed:
            trainer.publish(1)
        assert (failed.value.code, failed.value.rank) == (DigestMismatch.code, 1)
        assert vllm.holds(BASE)
        assert not vllm.paused
        assert trainer.publish(1).replicas[0].read == "staged"  # of the head nobody can tell
        assert vllm.holds(NEW)


def test_a_model_that_can_be_read_is_said_to_be_verified_as_it_is_installed(started: Started) -> None:
    readable = {name: tensor for name, tensor in NEW.items() if "head" not in name}
    start = {name: BASE[name] for name in readable}
    for verify, read in (("installed", "installed"), ("staged", "staged")):
        vllm = started(2, start)
        engine = lw.vllm(vllm, verify=verify)  # type: ignore[arg-type] # both are
        with lw.Publisher(readable, engines=[engine], secret=vllm.secret) as trainer:
            assert trainer.publish(1).replicas[0].read == read
            trainer.settings = replace(trainer.settings, verify=False)
            assert trainer.publish(2).replicas[0].read is None
    with pytest.raises(Refused, match="staged, installed"):
        lw.vllm(vllm, verify="perhaps")  # type: ignore[arg-type]


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


def test_the_first_round_into_a_vllm_that_was_started_again_goes_through(started: Started) -> None:
    vllm = started(2)
    with publisher(vllm) as trainer:
        trainer.publish(1)
        assert vllm.rests()
        vllm.restart()
        assert vllm.holds(BASE)
        trainer.publish(2)
        assert vllm.holds(NEW)
        assert (vllm.version, vllm.paused) == ("2", False)


@pytest.mark.parametrize("label", [1, 2])
def test_workers_that_outlived_their_vllm_are_not_taken_for_those_of_the_next(
    started: Started, short_path: Path, label: int
) -> None:
    vllm = started(2)
    engine = lw.vllm(vllm, address=f"ipc://{short_path}/worker-0.sock")
    with lw.Publisher(NEW, engines=[engine], secret=vllm.secret) as trainer:
        trainer.publish(1)
        vllm.restart(outlived=True)
        assert trainer.verify().match is not True
        vllm.restart(outlived=True)
        assert not trainer.publish(label).unchanged
        assert vllm.holds(NEW)
        assert (vllm.version, vllm.paused) == (str(label), False)
        assert trainer.verify().match


def test_a_successor_that_another_trainer_has_met_already_takes_the_next_round(
    started: Started, short_path: Path
) -> None:
    vllm = started(2)
    engine = lw.vllm(vllm, address=f"ipc://{short_path}/worker-0.sock")
    with lw.Publisher(NEW, engines=[engine], secret=vllm.secret) as trainer:
        trainer.publish(1)
        vllm.restart(outlived=True)
        with lw.Publisher(weights(5), engines=[engine], secret=vllm.secret) as other:
            other.publish("theirs")
        assert vllm.holds(weights(5))
        trainer.publish(2)
        assert vllm.holds(NEW)


def test_two_at_one_address_take_it_in_turns_and_neither_gets_what_is_the_others(
    started: Started, short_path: Path
) -> None:
    address, both = f"ipc://{short_path}/worker-0.sock", [started(2), started(2)]
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(
                lw.Publisher(weights(seed), engines=[lw.vllm(vllm, address=address)], secret=vllm.secret)
            )
            for seed, vllm in enumerate(both, start=3)
        ]
        for step in range(3):
            for seed, (trainer, vllm) in enumerate(zip(trainers, both, strict=True), start=3):
                _until_committed(trainer, step)
                assert vllm.holds(weights(seed))


def _until_committed(trainer: lw.Publisher, label: int) -> None:
    """A displaced leader may be found out in the middle of a round, which fails; the next one goes through."""
    try:
        trainer.publish(label)
    except RoundFailed:
        trainer.publish(label)


def test_a_vllm_that_can_not_be_told_anything_beside_its_user_rests_when_a_round_is_over(
    started: Started,
) -> None:
    vllm = started(2)
    vllm.concurrent = False
    tensors = weights(0)
    with lw.Publisher(tensors, engines=[lw.vllm(vllm)], secret=vllm.secret) as trainer:
        for step in range(3):
            trainer.publish(step)
            assert not vllm.active
        for tensor in tensors.values():
            tensor.add_(1)
        vllm.workers[0].failures = [2]
        with pytest.raises(RoundFailed):
            trainer.publish("failing")
        assert not vllm.active


def test_workers_keep_what_the_trainer_leaves_out_also_from_the_checkpoint_of_their_start(
    started: Started,
) -> None:
    vllm = started(2)
    only = {name: tensor for name, tensor in NEW.items() if "layers" in name}
    tower = {name: tensor for name, tensor in BASE.items() if "layers" not in name}
    differing = tower | {"lm_head.weight": NEW["lm_head.weight"]}
    with pytest.raises(KeptDiffers, match=r"lm_head\.weight$"):
        publisher(vllm, only, keep=differing)
    for keep in (tower, list(tower)):
        with publisher(vllm, only, keep=keep) as trainer:
            trainer.publish(1)
            assert trainer.verify().match
        assert vllm.holds(tower | only)


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
        connect(object(), key=None, loop=None)
    with pytest.raises(Refused, match="is no URL of a vLLM"):
        connect("127.0.0.1:8000", key=None, loop=None)
