"""How vLLM is paused and resumed around a commit, without vLLM: never longer than needed, never without a mark, and what failures leave."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import liveweight as lw
from liveweight.errors import DeadlineExceeded, RoundFailed
from tests.support.vllm_workers import BASE, MET, NEW, WHOLE, Four, Started, publisher


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


def test_a_version_that_a_dead_trainer_installed_and_did_not_name_is_named_before_vllm_goes_on(
    started: Started,
) -> None:
    vllm = started(1)
    with publisher(vllm) as trainer:
        trainer.publish("installed")
        assert vllm.rests()
    vllm.active = vllm.paused = True
    vllm.version = "before"
    told: list[tuple[str, str]] = []
    vllm.on_call = lambda: told.append((vllm.calls[-1], vllm.version))
    with publisher(vllm):
        assert (vllm.active, vllm.paused, vllm.version) == (False, False, "installed")
    assert told[-1] == ("resume", "installed")


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


def test_an_update_that_was_begun_for_a_round_that_comes_to_nothing_is_ended(started: Started) -> None:
    quick, slow = started(1), started(1)
    engines = [lw.vllm(quick), lw.vllm(slow, pace_bytes_per_s=1.0)]
    with lw.Publisher(NEW, engines=engines, secret=quick.secret) as trainer:
        trainer.offer(1)
        assert quick.receives("start", 2)  # the first was the handshake's
    assert quick.rests()
    assert quick.holds(BASE)
    assert "pause keep" not in quick.calls
    with publisher(quick) as trainer:
        trainer.publish(1)
        assert quick.holds(NEW)


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
        assert vllm.calls == [*MET, "init", "start", "update", "finish"]


def test_an_engine_that_was_committed_and_not_resumed_is_asked_again_and_resumed(started: Started) -> None:
    vllm = started(1)
    with publisher(vllm) as trainer:
        vllm.resumes_refused = 1
        (found,) = trainer.publish(1).replicas
        assert (found.committed, found.read) == (True, None), "what was read is not known"
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
