"""Live updates in the engine: rounds that a publisher drives while requests run. Real ranks, real rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import liveweight as lw
from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.engine.serving.awaiting_weights import STARTED
from liveweight.engine.serving.step_stream import weights_text
from liveweight.errors import DeadlineExceeded, WrongState
from tests.support.engine.engines import (
    WITHIN_S,
    Arch,
    Logits,
    Models,
    answers,
    ask,
    counting,
    greedy,
    penalised,
)
from tests.support.engine.versions import Clients, mixtures, spans
from tests.support.processes.fork_server import Zygote

Start = Callable[..., Engine]
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [300, 20, 7, 7, 7, 100], list(range(40, 75))]
STEPS = 250


def tokens_of(engine: Engine, count: int = 24) -> list[list[int]]:
    return [answer.ids for answer in answers(engine, PROMPTS, greedy(count))]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("arch", "mtp"), [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)])
def test_after_a_round_the_engine_answers_as_one_started_on_the_new_weights(
    start: Start, publisher: Any, models: Models, arch: Arch, mtp: bool, tp: int
) -> None:
    old, new = models.directory(arch, mtp=mtp), models.directory(arch, mtp=mtp, seed=1)
    engine = start(old, tp=tp)
    before = tokens_of(engine)
    with_new = publisher(engine, new)
    report = with_new.publish("new")
    assert tokens_of(engine) == tokens_of(start(new, tp=tp)) != before
    assert engine.status().weights == weights_text(report.version)
    assert with_new.undo() == (engine.start,)
    assert tokens_of(engine) == before
    assert engine.status().weights == weights_text(engine.start)
    assert (engine.update_status().serving, engine.update_status().undo) == (engine.start, None)


LOADS = [
    pytest.param(6, 8, id="6 clients, 8 rounds"),
    pytest.param(32, 50, id="32 clients, 50 rounds", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize(("clients", "rounds"), LOADS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_no_token_comes_from_a_mixture_while_rounds_commit(
    start: Start,
    publisher: Any,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    tp: int,
    overlap: bool,
    clients: int,
    rounds: int,
) -> None:
    directories = [models.directory(), models.directory(seed=1), models.directory(seed=2)]
    engine = start(directories[0], tp=tp, overlap=overlap)
    logits = {weights_text(engine.start): transformers_logits(directories[0])}
    publishers = [publisher(engine, directory) for directory in directories]
    with Clients(engine, clients, 60) as asking:
        for number in range(rounds):
            report = publishers[(number + 1) % 3].publish(number)
            logits[weights_text(report.version)] = transformers_logits(directories[(number + 1) % 3])
            assert asking.began.acquire(timeout=WITHIN_S)  # requests go on in between
    assert all(answer.finish == "length" and len(answer.ids) == 60 for _, answer in asking.answers)
    assert mixtures(asking.answers, logits.__getitem__) == []
    assert sum(len(spans(answer)) > 1 for _, answer in asking.answers) >= rounds / 2
    status = engine.status()
    assert (status.running, status.waiting, status.blocks_free) == (0, 0, status.blocks_total)


def test_with_shadows_on_the_host_no_token_comes_from_a_mixture_either(
    start: Start, publisher: Any, models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    directories = [models.directory(), models.directory(seed=1)]
    engine = start(directories[0], tp=2, updates={"shadow": "host", "staging_threads": 2})
    logits = {weights_text(engine.start): transformers_logits(directories[0])}
    publishers = [publisher(engine, directory) for directory in directories]
    with Clients(engine, 3, 60) as asking:
        for number in range(4):
            report = publishers[(number + 1) % 2].publish(number)
            logits[weights_text(report.version)] = transformers_logits(directories[(number + 1) % 2])
            assert asking.began.acquire(timeout=WITHIN_S)
    assert mixtures(asking.answers, logits.__getitem__) == []
    now = tokens_of(engine)
    engine.undo(WITHIN_S)
    assert tokens_of(engine) != now == tokens_of(start(directories[0], tp=2))


def test_with_reuse_every_token_says_its_weights_and_old_pages_are_not_found_again(
    start: Start, publisher: Any, models: Models
) -> None:
    new = models.directory(seed=1)
    engine = start(models.directory(), tp=2, kv_policy="reuse")
    asked = [ask(engine, prompt, greedy(600)) for prompt in PROMPTS]
    for answer in asked:
        answer.piece()
    report = publisher(engine, new).publish("new")
    for answer in asked:
        assert answer.wait().finish == "length"
        assert [weights for _, _, weights in spans(answer)] == [
            weights_text(engine.start),
            weights_text(report.version),
        ]
        assert answer.last is not None
        assert answer.last.reused_kv
    assert engine.status().counts.preemptions == 0
    again = answers(engine, PROMPTS, greedy(24))
    assert [answer.ids for answer in again] == tokens_of(start(new, tp=2))
    assert all(answer.last is not None and not answer.last.reused_kv for answer in again)


@pytest.mark.parametrize("kv_policy", ["recompute", "reuse"])
def test_a_repetition_penalty_goes_on_over_a_commit(
    start: Start,
    publisher: Any,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    kv_policy: str,
) -> None:
    old, new = models.directory(), models.directory(seed=0 if kv_policy == "reuse" else 1)
    engine = start(old, tp=2, kv_policy=kv_policy)
    asked = [(prompt, ask(engine, prompt, greedy(400, repetition_penalty=1.3))) for prompt in PROMPTS]
    for _, answer in asked:
        answer.piece()
    report = publisher(engine, new).publish("new")
    after = {
        weights_text(engine.start): penalised(transformers_logits(old), 1.3),
        weights_text(report.version): penalised(transformers_logits(new), 1.3),
    }
    for _, answer in asked:
        assert answer.wait().finish == "length"
        assert len(spans(answer)) == 2
    assert mixtures(asked, after.__getitem__) == []
    assert (engine.status().counts.preemptions > 0) == (kv_policy == "recompute")


@pytest.mark.parametrize("who", ["engine", "publisher"])
def test_with_drop_running_requests_end_with_what_they_have(
    start: Start, publisher: Any, models: Models, who: str
) -> None:
    policy = {"kv_policy": "drop"}
    engine = start(models.directory(), **(policy if who == "engine" else {}))
    asked = [ask(engine, prompt, greedy(1500)) for prompt in PROMPTS]
    for answer in asked:
        answer.piece()
    publisher(engine, models.directory(seed=1), **(policy if who == "publisher" else {})).publish("new")
    for answer in asked:
        assert answer.wait().finish == "abort"
        assert [weights for _, _, weights in spans(answer)] == [weights_text(engine.start)]


def test_an_idle_engine_commits_at_once(start: Start, publisher: Any, models: Models) -> None:
    engine = start(models.directory(), tp=2)
    source = publisher(engine, models.directory(seed=1))
    report = source.publish("new")
    update_status = engine.update_status()
    assert (update_status.serving, update_status.undo, update_status.round) == (
        report.version,
        engine.start,
        None,
    )
    assert engine.status().counts.steps == 0
    assert engine.undo(WITHIN_S) == engine.start
    assert (engine.update_status().serving, engine.update_status().undo) == (engine.start, None)
    assert [(r.version, r.outcome) for r in engine.update_status().rounds] == [
        ("new", "committed"),
        ("new", "undone"),
    ]
    with pytest.raises(WrongState, match="no version before it"):
        engine.undo(WITHIN_S)
    assert source.publish("new").version == report.version  # the way forward is a round
    assert engine.update_status().serving == report.version


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("arch", "tied", "mtp"), [("qwen3", True, False), ("qwen3", False, True), ("qwen3_moe", True, False)]
)
def test_the_weights_of_the_start_have_the_digest_that_a_push_of_the_same_directory_has(
    start: Start, publisher: Any, models: Models, arch: Arch, tied: bool, mtp: bool, tp: int
) -> None:
    directory = models.directory(arch, tied=tied, mtp=mtp, dtype="bfloat16")
    engine = start(directory, tp=tp, dtype="float32")
    assert (engine.start.run, engine.start.label) == ("start", "initial")
    asked = ask(engine, PROMPTS[0], greedy(400))
    asked.piece()
    report = publisher(engine, directory).publish("same")
    assert report.unchanged is False  # another name: run and label identify a version
    assert report.version.digest == engine.start.digest
    assert engine.update_status().serving == report.version
    assert asked.wait().finish == "length"  # under the same content requests go on as they are
    assert [weights for _, _, weights in spans(asked)] == [
        weights_text(engine.start),
        weights_text(report.version),
    ]
    assert asked.last is not None
    assert (asked.last.reused_kv, engine.status().counts.preemptions) == (False, 0)


def test_a_pause_that_keeps_requests_lets_them_go_on_where_they_were(
    start: Start, publisher: Any, models: Models
) -> None:
    new = models.directory(seed=1)
    engine = start(models.directory(), tp=2, kv_policy="reuse")
    asked = ask(engine, PROMPTS[0], greedy(400))
    asked.piece()
    engine.pause("keep", WITHIN_S)
    assert engine.paused == "paused"
    late = ask(engine, PROMPTS[1], greedy(8))
    steps = engine.status().counts.steps
    publisher(engine, new).publish("new")  # a paused engine commits, too
    assert engine.status().counts.steps == steps
    assert late.pieces.empty()
    engine.resume()
    assert asked.wait().finish == late.wait().finish == "length"
    assert len(asked.ids) == 400
    assert len(spans(asked)) == 2
    assert len(spans(late)) == 1


def test_a_pause_that_waits_lets_requests_finish_and_keeps_new_ones_back(
    start: Start, models: Models
) -> None:
    engine = start(models.directory())
    asked = ask(engine, PROMPTS[0], greedy(200))
    asked.piece()
    engine.pause("wait", WITHIN_S)
    assert asked.wait().finish == "length"
    late = ask(engine, PROMPTS[1], greedy(8))
    assert (engine.paused, engine.status().waiting, engine.status().running) == ("paused", 1, 0)
    engine.resume()
    assert late.wait().finish == "length"


def test_a_pause_that_takes_too_long_says_so_and_comes_all_the_same(start: Start, models: Models) -> None:
    engine = start(models.directory())
    asked = ask(engine, PROMPTS[0], greedy(1500))
    asked.piece()
    with pytest.raises(DeadlineExceeded, match="running requests"):
        engine.pause("wait", 0.0)
    assert engine.status().paused == "draining"
    engine.pause("abort", WITHIN_S)
    assert asked.wait().finish == "abort"
    assert engine.status().paused == "paused"


def test_requests_can_be_ended_by_number_or_all_at_once(start: Start, models: Models) -> None:
    engine = start(models.directory(), max_running=2)
    asked = [ask(engine, prompt, greedy(1500)) for prompt in PROMPTS]
    asked[0].piece()
    assert engine.abort_requests([10**6]) == 0
    assert engine.abort_requests() == 4
    assert [answer.wait().finish for answer in asked] == ["abort"] * 4


def test_what_the_engine_does_not_expect_is_refused_and_it_serves_on(
    start: Start, publisher: Any, models: Models
) -> None:
    engine = start(models.directory(), tp=2)
    before = tokens_of(engine)
    with pytest.raises(lw.errors.ManifestMismatch, match="lm_head"):
        publisher(engine, models.directory(tied=False))
    assert tokens_of(engine) == before


def test_updates_cost_no_collective_in_the_normal_state(
    zygote: Zygote, short_path: Path, models: Models, tmp_path: Path
) -> None:
    updates = Updates(address=f"ipc://{short_path}/engine.sock", secret_file=str(short_path / "secret"))
    counts = {}
    for name, given in (("on", updates), ("off", None)):
        directory = tmp_path / name
        directory.mkdir()
        config = EngineConfig(model=str(models.directory()), threads=1, tp=2, updates=given)
        with Engine(config, launch=counting(zygote, directory)) as engine:
            assert ask(engine, [5, 6, 7], greedy(STEPS)).wait().finish == "length"
            steps = engine.status().counts.steps
        counts[name] = [json.loads((directory / str(rank)).read_text()) for rank in (0, 1)]
        assert steps in (STEPS, STEPS + 1)  # with overlap there may be one more, for a request that has ended
        assert set(counts[name][0]) == {"add", "join"}
        layers = models.layers()
        assert counts[name][0]["add"] == steps * (2 * layers + 1)
        assert counts[name][0]["join"] == steps
        counts[name] = [{kind: n / steps for kind, n in of_rank.items()} for of_rank in counts[name]]
    assert counts["on"] == counts["off"]


def test_a_fleet_does_not_call_an_engine_serving_that_takes_no_requests(
    start: Start, publisher: Any, models: Models
) -> None:
    engine = start(models.directory(), tp=1, await_weights=True)
    trainer = publisher(engine, models.directory(seed=1))

    def state() -> tuple[str, str | None]:
        (status,) = trainer.fleet().replicas
        return status.state, status.not_serving

    refusing = f"takes no requests: {STARTED}"
    assert state() == (f"holding initial; {refusing}", refusing)
    trainer.publish(1)
    assert state() == ("serving 1", None)
    engine.pause("keep", WITHIN_S)
    assert state() == ("holding 1; paused: new requests wait", "paused: new requests wait")
    engine.resume()
    assert state() == ("serving 1", None)
    engine.sleep(["kv_cache"], WITHIN_S)
    assert state()[0].startswith("asleep at 1")
    engine.wake(["kv_cache"], WITHIN_S)
    assert state() == ("serving 1", None)
