"""Engines that sleep and wake up: memory is released and restored, answers stay right, and nothing runs on what is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import liveweight as lw
from liveweight.engine.engine import Engine
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES, Size
from liveweight.engine.serving.sleeping import TAGS, Tag
from liveweight.engine.updates.verifying import VerificationRequest
from liveweight.errors import Damage, OutOfSpace, RoundFailed, RoundOpen, WrongState
from tests.support.engine.engines import WITHIN_S, Answer, Models, ask, greedy
from tests.support.processes.http_server import serving
from tests.support.processes.real_servers import until

PROMPT = [5, 6, 7, 8]
Start = Callable[..., Engine]
Publishers = Callable[..., lw.Publisher]
BOTH: tuple[Tag, ...] = TAGS
MIDDLING = Size(
    hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=1024, vocab=4096, max_positions=2048
)
"""5 M parameters: they show in the memory of the ranks, and are written in no time."""
SOME = st.sampled_from([("weight",), ("kv_cache",), BOTH])


def greedy_answer(engine: Engine) -> list[int]:
    """A greedy answer."""
    return ask(engine, PROMPT, greedy(8)).wait().ids


def resident(engine: Engine) -> int:
    """Private bytes of all ranks that are in memory."""
    found = 0
    for pid in engine.pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights show in the memory of its ranks: 30 M parameters."""
    path = tmp_path_factory.mktemp("large") / "model"
    init_model(path, SIZES["qwen3"]["small"], mtp=False, tied=True, seed=0, dtype="float32")
    return path


@pytest.mark.timeout(300)
def test_memory_is_given_back_and_comes_again(start: Start, large: Path) -> None:
    engine = start(large, tp=2, kv_bytes=256 << 20)
    before = greedy_answer(engine)
    size_bytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    awake = resident(engine)
    slept = engine.sleep(["weight"], WITHIN_S)
    asleep = resident(engine)
    assert slept.size_bytes > 0.9 * size_bytes
    assert awake - asleep > 0.8 * size_bytes
    woken = engine.wake(["weight"], WITHIN_S)
    assert (woken.asleep, woken.changed) == ((), ("weight",))
    assert resident(engine) - asleep > 0.8 * size_bytes
    assert greedy_answer(engine) == before


@pytest.mark.timeout(300)
def test_the_cache_is_given_back_and_requests_that_ran_go_on_to_the_same_answer(
    start: Start, large: Path
) -> None:
    engine = start(large, tp=1, kv_bytes=256 << 20)
    whole = ask(engine, PROMPT, greedy(60)).wait().ids
    answer = ask(engine, PROMPT, greedy(60))
    answer.piece()
    filled = [ask(engine, [token] * 400, greedy(1)) for token in range(9, 13)]
    for one in filled:
        one.wait()
    awake = resident(engine)
    slept = engine.sleep(["kv_cache"], WITHIN_S)
    assert slept.size_bytes > 200 << 20
    assert awake - resident(engine) > 4 << 20  # the pages that were used
    assert engine.status().state == "asleep"
    engine.wake(["kv_cache"], WITHIN_S)
    assert answer.wait().ids == whole


def test_nothing_runs_while_it_sleeps_and_wrong_orders_are_refused(
    start: Start, publisher: Publishers, models: Models
) -> None:
    engine = start(models.directory(), tp=2, kv_bytes=4 << 20)
    before, made = greedy_answer(engine), publisher(engine, models.directory(seed=1))
    engine.sleep(BOTH, WITHIN_S)
    waiting = ask(engine, PROMPT, greedy(8))
    with pytest.raises(WrongState, match="asleep"):
        engine.resume()
    with pytest.raises(WrongState, match="asleep at initial"):
        engine.undo(WITHIN_S)
    with pytest.raises(WrongState, match="asleep at initial"):
        engine.verify(VerificationRequest(timeout_s=WITHIN_S))
    with pytest.raises(RoundFailed, match="asleep at initial") as refused:
        made.publish("step_1")
    assert isinstance(refused.value.cause, WrongState)
    assert engine.wake(["kv_cache"], WITHIN_S).asleep == ("weight",)
    assert waiting.pieces.empty()  # weights are not there: nothing went on by itself
    assert engine.sleep(["weight"], WITHIN_S).changed == ()
    assert engine.wake(BOTH, WITHIN_S).asleep == ()
    assert engine.wake(BOTH, WITHIN_S).changed == ()
    assert waiting.wait().ids == before
    assert made.publish("step_1").behind == ()
    assert greedy_answer(engine) != before
    assert made.verify().match


def test_an_operators_pause_outlasts_a_sleep(start: Start, models: Models) -> None:
    engine = start(models.directory(), kv_bytes=4 << 20)
    engine.pause("keep", WITHIN_S)
    engine.sleep(["kv_cache"], WITHIN_S)
    engine.wake(["kv_cache"], WITHIN_S)
    assert engine.paused == "paused"
    engine.resume()
    assert len(greedy_answer(engine)) == 8


def test_a_round_that_is_open_keeps_an_engine_awake(
    start: Start, publisher: Publishers, models: Models
) -> None:
    engine = start(models.directory(), tp=2, kv_bytes=4 << 20)
    at_vote, go_on = threading.Event(), threading.Event()
    made = publisher(engine, models.directory(seed=1), lease_s=60.0)
    replica = made._replicas[0]
    vote = replica.vote

    def hold(*given: object) -> None:
        at_vote.set()
        assert go_on.wait(WITHIN_S)
        vote(*given)  # type: ignore[arg-type]

    setattr(replica, "vote", hold)  # noqa: B010 - a method, which mypy would not have assigned to
    made.offer("step_1")
    assert at_vote.wait(WITHIN_S)
    with pytest.raises(RoundOpen):
        engine.sleep(BOTH, WITHIN_S)
    go_on.set()
    made.wait()
    assert engine.status().state == "running"


def test_weights_that_cannot_be_written_leave_it_awake(start: Start, models: Models, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    engine = start(models.directory(), tp=2, kv_bytes=4 << 20, sleep_directory=str(full))
    before = greedy_answer(engine)
    full.rmdir()
    with pytest.raises(OutOfSpace, match="full"):
        engine.sleep(["weight"], WITHIN_S)
    assert (engine.status().state, engine.status().asleep) == ("running", ())
    assert greedy_answer(engine) == before


def test_weights_that_were_damaged_on_disk_are_named_and_leave_it_asleep(
    start: Start, models: Models, tmp_path: Path
) -> None:
    engine = start(models.directory(), tp=2, kv_bytes=4 << 20, sleep_directory=str(tmp_path))
    before = greedy_answer(engine)
    engine.sleep(["weight"], WITHIN_S)
    part = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = part.read_bytes()
    middle = len(whole) // 2  # what lies at the end may be a copy that nobody reads
    part.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    for _ in range(2):
        with pytest.raises(Damage):
            engine.wake(["weight"], WITHIN_S)
        assert engine.status().state == "asleep"
        with pytest.raises(WrongState):
            engine.resume()
    part.write_bytes(whole)
    engine.wake(["weight"], WITHIN_S)
    assert greedy_answer(engine) == before
    assert list(tmp_path.iterdir()) == []


class Nights(RuleBasedStateMachine):
    """Sleeps, wake-ups, pauses, rounds and requests in any order, beside a model of what is asleep. Over HTTP."""

    engine: Engine
    http: httpx.Client
    publishers: list[lw.Publisher]
    expected: list[list[int]]
    size_bytes: int
    """Of the weights, on all ranks."""
    count = serving = 0

    def __init__(self) -> None:
        super().__init__()
        self.asleep: set[str] = set()
        self.paused = False
        self.waiting: list[tuple[Answer, int]] = []

    @rule(tags=SOME)
    def sleep(self, tags: tuple[Tag, ...]) -> None:
        before = resident(self.engine)
        changed = self._changed("/v1/sleep", tags)
        assert set(changed) == set(tags) - self.asleep
        if "weight" in changed:
            assert before - resident(self.engine) > 0.6 * self.size_bytes
        self.asleep |= set(tags)

    @rule(tags=SOME)
    def wake(self, tags: tuple[Tag, ...]) -> None:
        before = resident(self.engine)
        changed = self._changed("/v1/wakeup", tags)
        assert set(changed) == set(tags) & self.asleep
        if "weight" in changed:
            assert resident(self.engine) - before > 0.6 * self.size_bytes
        self.asleep -= set(tags)
        self._settle()

    @rule()
    def ask(self) -> None:
        self.waiting.append((ask(self.engine, PROMPT, greedy(4)), self.serving))
        self._settle()

    @rule()
    def pause(self) -> None:
        assert self.http.post("/v1/pause", json={"mode": "keep"}).status_code == 200
        self.paused = True

    @rule()
    def resume(self) -> None:
        assert self.http.post("/v1/resume").status_code == (409 if self.asleep else 200)
        self.paused = self.paused and bool(self.asleep)
        self._settle()

    @rule()
    def verify(self) -> None:
        found = self.http.post("/v1/weights/verify")
        assert found.status_code == (409 if "weight" in self.asleep else 200)
        assert "weight" in self.asleep or found.json()["match"]

    @rule()
    def go_back(self) -> None:
        if self.asleep:
            assert self.http.post("/v1/weights/undo").status_code == 409

    @rule(which=st.integers(0, 1))
    def publish(self, which: int) -> None:
        type(self).count += 1
        if self.asleep:
            with pytest.raises(RoundFailed, match="asleep"):
                self.publishers[which].publish(f"step_{self.count}")
            return
        self.publishers[which].publish(f"step_{self.count}")
        type(self).serving = which
        self.waiting = [(answer, -1) for answer, _ in self.waiting]

    def _changed(self, route: str, tags: tuple[Tag, ...]) -> list[str]:
        """What changed."""
        answer = self.http.post(route, json={"tags": tags})
        assert answer.status_code == 200, answer.text
        changed: list[str] = answer.json()["changed"]
        return changed

    def _settle(self) -> None:
        if self.asleep or self.paused:
            return
        for answer, which in self.waiting:
            found = answer.wait().ids
            assert found in self.expected if which < 0 else found == self.expected[which]
        self.waiting.clear()

    @invariant()
    def tells_what_is_asleep(self) -> None:
        status = self.engine.status()
        assert set(status.asleep) == self.asleep
        assert status.state == ("asleep" if self.asleep else "running")

    def teardown(self) -> None:
        self.wake(BOTH)
        self.resume()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nights", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_nights_in_any_order(start: Start, publisher: Publishers, tmp_path: Path, nights: int) -> None:
    directories = [tmp_path / str(seed) for seed in range(3)]
    for seed, path in enumerate(directories):
        init_model(path, MIDDLING, mtp=False, tied=True, seed=seed, dtype="float32")
    engine = start(directories[0], tp=2, kv_bytes=4 << 20)
    with serving(engine) as served, served.http() as http:
        http.timeout = WITHIN_S
        Nights.engine, Nights.http = engine, http
        Nights.size_bytes = sum(file.stat().st_size for file in directories[0].glob("*.safetensors"))
        Nights.publishers = [publisher(engine, path, run=path.name) for path in directories[1:]]
        Nights.expected = []
        for made in Nights.publishers:
            made.publish("first")
            Nights.expected.append(greedy_answer(engine)[:4])
        Nights.publishers[0].publish("again")
        Nights.serving = 0
        assert Nights.expected[0] != Nights.expected[1]
        run_state_machine_as_test(
            Nights,
            settings=settings(
                max_examples=nights,
                stateful_step_count=10,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        until(lambda: engine.status().running == 0, "an engine without requests")
