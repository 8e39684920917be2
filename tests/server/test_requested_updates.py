"""Updates that are asked for: a source in a process of its own, served engines of two ranks, and each of them dying or going on."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import liveweight as lw
from liveweight.engine.engine import Engine
from liveweight.server.admin.call_ids import HEADER
from tests.cli.test_push import ASK, HeldReplica, live, said, secret_file
from tests.server.admin.test_routes import Stream
from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.cli import Cli, Command
from tests.support.processes.cluster import Program
from tests.support.processes.fork_server import Zygote
from tests.support.processes.http_server import Served
from tests.support.processes.real_servers import until

UPDATE = "/v1/update_weights"
SLOW = 150_000.0
"""Bytes per second at which a rank stages half of a tiny model in some seconds."""


class Stage:
    """A served engine at the weights of seed 0, whose source is a process of its own."""

    def __init__(self, served: Served[Engine], source: Program, models: Models) -> None:
        self.served, self.source, self._models = served, source, models
        self.url = served.url

    def offer(self, label: str | int, seed: int) -> str:
        """Let the source offer that version; its digest."""
        answer = self.source.ask("offer", label=label, model=str(self._models.directory(seed=seed)))
        assert "error" not in answer, answer
        return str(answer["digest"])

    def ask(self, **body: Any) -> httpx.Response:
        """Ask for an update."""
        return httpx.post(f"{self.url}{UPDATE}", json=body, timeout=WITHIN_S)

    def weights(self) -> dict[str, Any]:
        """What the engine says of its weights."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/v1/weights", timeout=WITHIN_S).json()
        return answer

    def until_open(self) -> None:
        """A round is open."""
        until(lambda: self.weights()["round"] is not None, "an open round")

    def assert_serves(self, label: str | int) -> None:
        """The engine says so, takes requests, and has no round open."""
        weights = self.weights()
        assert (weights["version"]["label"], weights["round"]) == (label, None)
        assert said(self.url)["weight_version"]["label"] == str(label)
        assert httpx.get(f"{self.url}/health").status_code == 200


def source_of(zygote: Zygote, place: Path, model: Path, release_s: float) -> Program:
    config = {
        "model": str(model),
        "address": f"ipc://{place}/source.sock",
        "secret": str(secret_file(place)),
        "directory": str(place / "trainer"),
        "release_s": release_s,
    }
    source = Program(zygote, "tests.support.programs.source_program", config)
    source.expect("ready")
    return source


@contextmanager
def staged(
    zygote: Zygote, place: Path, models: Models, *, release_s: float = 30.0, **updates: Any
) -> Iterator[Stage]:
    model = models.directory()
    with live(zygote, place, model, source=f"ipc://{place}/source.sock", **updates) as served:
        source = source_of(zygote, place, model, release_s)
        try:
            yield Stage(served, source, models)
        finally:
            source.close()


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_an_engine_takes_the_newest_or_a_named_version_and_answers_as_one_started_on_it(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with live(zygote, short_path, models.directory(seed=1)) as reference:
        expected = said(reference.url)["text"]
    with staged(zygote, short_path, models) as stage:
        before = said(stage.url)["text"]
        nothing = stage.ask()
        assert problem(nothing) == (409, "LW-105")
        assert nothing.json()["error"]["offered"] == []
        digest = stage.offer("step_1", seed=1)
        answer = stage.ask()
        body = answer.json()
        assert (answer.status_code, body["outcome"], body["verified"]) == (200, "committed", True)
        assert body["version"] == {"run": "run", "label": "step_1", "digest": digest, "number": 1}
        assert [rank["rank"] for rank in body["results"]] == [0, 1]
        for rank in body["results"]:
            assert (rank["version"], rank["staged_bytes"] > 0) == ("step_1", True)
            assert min(rank["sync_cost"], rank["verify_s"], rank["update_cost"]) > 0
            assert rank["total_cost"] == pytest.approx(rank["stage_s"] + rank["verify_s"] + rank["swap_s"])
            assert rank["stage_s"] <= body["steps"]["stage_s"] <= body["steps"]["total_s"]
        assert said(stage.url)["text"] == expected != before
        assert body["round"] is not None
        again = stage.ask(version="step_1")
        assert (again.json()["outcome"], again.json()["round"]) == ("unchanged", None)
        assert again.headers[HEADER] != answer.headers[HEADER]

        stage.offer(7, seed=0)
        unknown = stage.ask(version="step_1")
        assert problem(unknown) == (409, "LW-105")
        assert unknown.json()["error"]["offered"] == ["7"]
        stage.assert_serves("step_1")
        assert stage.ask(version="7", transfer_mode="ipc", verify_checksum=False).json()["verified"] is False
        assert said(stage.url)["text"] == before
        assert stage.weights()["version"]["label"] == 7
        assert httpx.post(f"{stage.url}/v1/weights/undo", timeout=WITHIN_S).status_code == 200
        stage.assert_serves("step_1")


def test_without_a_source_an_update_fails_and_the_engine_serves_on(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models) as stage:
        stage.offer("step_1", seed=1)
        stage.source.kill()
        gone = stage.ask()
        assert problem(gone) == (503, "LW-205")
        assert "source.sock" in gone.json()["error"]["message"]
        stage.assert_serves("initial")
        restarted = source_of(zygote, short_path, models.directory(), 30.0)
        stage.source = restarted
        try:
            stage.offer("step_1", seed=1)
            assert stage.ask().json()["outcome"] == "committed"
            stage.assert_serves("step_1")
        finally:
            restarted.close()


def test_a_source_that_is_killed_while_ranks_stage_fails_the_round_and_the_next_succeeds(
    models: Models, short_path: Path, zygote: Zygote, asking: ThreadPoolExecutor
) -> None:
    with staged(zygote, short_path, models, pace_bytes_per_s=SLOW) as stage:
        stage.offer("step_1", seed=1)
        before = said(stage.url)["text"]
        update = asking.submit(stage.ask)
        stage.until_open()
        stage.source.kill()
        failed = update.result(WITHIN_S)
        assert problem(failed) == (503, "LW-205")
        assert "Still serving initial; a retry may help" in failed.json()["error"]["message"]
        stage.assert_serves("initial")
        assert said(stage.url)["text"] == before
        restarted = source_of(zygote, short_path, models.directory(), 30.0)
        stage.source = restarted
        try:
            stage.offer("step_1", seed=1)
            assert stage.ask().json()["outcome"] == "committed"
            stage.assert_serves("step_1")
        finally:
            restarted.close()


def test_a_new_offer_waits_for_ranks_that_read_and_revokes_none_of_them(
    models: Models, short_path: Path, zygote: Zygote, asking: ThreadPoolExecutor
) -> None:
    with staged(zygote, short_path, models, pace_bytes_per_s=SLOW, release_s=60.0) as stage:
        digest = stage.offer("step_1", seed=1)
        update = asking.submit(stage.ask, version="step_1")
        stage.until_open()
        stage.offer("step_2", seed=2)
        body = update.result(WITHIN_S).json()
        assert (body["outcome"], body["version"]["digest"]) == ("committed", digest)
        assert stage.ask().json()["version"]["label"] == "step_2"
        stage.assert_serves("step_2")


def test_a_new_offer_revokes_ranks_that_read_too_long_and_asking_again_succeeds(
    models: Models, short_path: Path, zygote: Zygote, asking: ThreadPoolExecutor
) -> None:
    with staged(zygote, short_path, models, pace_bytes_per_s=SLOW, release_s=0.1) as stage:
        stage.offer("step_1", seed=1)
        update = asking.submit(stage.ask)
        stage.until_open()
        stage.offer("step_2", seed=2)
        failed = update.result(WITHIN_S)
        assert problem(failed) == (503, "LW-403")
        assert "a retry may help" in failed.json()["error"]["message"]
        stage.assert_serves("initial")
        assert stage.ask().json()["version"]["label"] == "step_2"
        stage.assert_serves("step_2")


def test_of_two_updates_at_once_one_is_refused_naming_the_other(
    models: Models, short_path: Path, zygote: Zygote, asking: ThreadPoolExecutor
) -> None:
    with (
        staged(zygote, short_path, models, pace_bytes_per_s=SLOW) as stage,
        lw.Publisher(
            models.directory(seed=2), engines=[stage.url], secret=secret_file(short_path)
        ) as trainer,
    ):
        stage.offer("step_1", seed=1)
        update = asking.submit(stage.ask)
        stage.until_open()
        second, health = stage.ask(), httpx.get(f"{stage.url}/health")
        with pytest.raises(lw.RoundFailed) as pushed:
            trainer.publish("pushed")
        first = update.result(WITHIN_S)
        holder = f"operator/{first.json()['call_id']}"
        assert (first.status_code, health.status_code) == (200, 200)
        assert problem(second) == (409, "LW-106")
        assert holder in second.json()["error"]["message"]
        assert pushed.value.code == "LW-106"
        assert holder in str(pushed.value)
        stage.assert_serves("step_1")


def test_while_a_trainer_drives_a_round_an_update_is_refused_naming_the_trainer(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models) as stage:
        stage.offer("step_1", seed=1)
        held = HeldReplica(stage.served.engine.address or "", short_path)
        with lw.Publisher(
            models.directory(seed=2), engines=[held], secret=secret_file(short_path), lease_s=60.0
        ) as publisher:
            publisher.offer("pushed")
            assert held.at_vote.wait(WITHIN_S)
            refused = stage.ask()
            held.go_on.set()
            publisher.wait()
        assert problem(refused) == (409, "LW-106")
        assert publisher.name in refused.json()["error"]["message"]
        stage.assert_serves("pushed")


def test_a_deadline_that_is_too_short_is_a_504_that_names_who_was_waited_for(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models, pace_bytes_per_s=SLOW) as stage:
        stage.offer("step_1", seed=1)
        late = stage.ask(timeout_s=0.5)
        assert problem(late) == (504, "LW-301")
        assert re.search(r"rank 0, 1 .* to be staged", late.json()["error"]["message"])
        stage.assert_serves("initial")
        assert stage.ask().json()["outcome"] == "committed"


def test_what_the_engine_does_not_expect_is_refused_by_name_and_a_dtype_can_be_chosen(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    place: dict[str, Any] = {"secret": secret_file(short_path), "directory": short_path / "trainer"}
    address = f"ipc://{short_path}/source.sock"
    half = models.directory(seed=1, dtype="bfloat16")
    with live(zygote, short_path, models.directory(), source=address) as served:
        with lw.Publisher(half, address=address, **place) as publisher:
            publisher.offer("half")
            refused = httpx.post(f"{served.url}{UPDATE}", timeout=WITHIN_S)
        with lw.Publisher(half, address=address, dtype="float32", **place) as publisher:
            publisher.offer("cast")
            cast = httpx.post(f"{served.url}{UPDATE}", timeout=WITHIN_S)
    assert problem(refused) == (409, "LW-101")
    assert "model.norm.weight" in refused.json()["error"]["message"] or "bfloat16" in refused.text
    assert cast.json()["version"]["label"] == "cast"


def test_a_publisher_with_engines_and_an_address_serves_both(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with (
        live(zygote, short_path, models.directory(seed=2)) as driven,
        lw.Publisher(
            models.directory(seed=1),
            engines=[driven.url],
            address="tcp://127.0.0.1:0",
            secret=secret_file(short_path),
        ) as publisher,
        live(zygote, short_path, models.directory(), source=publisher.address) as asking,
    ):
        publisher.publish("step_1")
        assert httpx.post(f"{asking.url}{UPDATE}", timeout=WITHIN_S).status_code == 200
        assert said(asking.url)["text"] == said(driven.url)["text"]


def test_updates_leave_nothing_behind(models: Models, short_path: Path, zygote: Zygote) -> None:
    def kept() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with staged(zygote, short_path, models) as stage:
        for number in range(2):
            stage.offer(number, seed=number)
            assert stage.ask().status_code == 200
            assert stage.ask(version="none").status_code == 409
        before = kept()
        for number in range(2, 8):
            stage.offer(number, seed=number % 2)
            assert stage.ask(pause="keep").json()["outcome"] == "committed"
            assert stage.ask().json()["outcome"] == "unchanged"
            assert stage.ask(version="none").status_code == 409
        until(
            lambda: all(now <= then for now, then in zip(kept(), before, strict=True)),
            "as few descriptors and threads as before",
        )


def test_an_aborting_pause_ends_what_runs_and_the_engine_runs_on(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models) as stage:
        stage.offer("step_1", seed=1)
        stream = Stream(stage.url, **{**ASK, "max_tokens": 1500})
        assert stream.begun.wait(WITHIN_S)
        body = stage.ask(pause="abort").json()
        stream.join(WITHIN_S)
        assert (stream.finish, body["outcome"]) == ("abort", "committed")
        assert stream.chunks[0]["choices"][0]["weight_version"]["label"] == "initial"
        assert stage.weights()["paused"] == "running"
        stage.assert_serves("step_1")


def test_an_engine_that_an_operator_paused_stays_paused(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models) as stage:
        stage.offer("step_1", seed=1)
        httpx.post(f"{stage.url}/v1/pause", timeout=WITHIN_S)
        stream = Stream(stage.url, **ASK)
        until(lambda: stage.served.engine.status().waiting == 1, "a request that waits")
        assert stage.ask(pause="wait").json()["outcome"] == "committed"
        assert stage.weights()["paused"] == "paused"
        httpx.post(f"{stage.url}/v1/resume", timeout=WITHIN_S)
        stream.join(WITHIN_S)
    assert stream.chunks[-1]["choices"][0]["weight_version"]["label"] == "step_1"


def test_a_pause_that_does_not_come_fails_the_round_and_is_taken_back(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with staged(zygote, short_path, models) as stage:
        stage.offer("step_1", seed=1)
        streams = [Stream(stage.url, **{**ASK, "max_tokens": 1900}) for _ in range(2)]
        for stream in streams:
            assert stream.begun.wait(WITHIN_S)
        late = stage.ask(pause="wait", timeout_s=1.0)
        assert problem(late) == (504, "LW-301")
        assert "running requests to finish" in late.json()["error"]["message"]
        assert stage.weights()["paused"] == "running"
        assert said(stage.url)["weight_version"]["label"] == "initial"  # requests run again
        httpx.post(f"{stage.url}/v1/abort_requests", timeout=WITHIN_S)
        for stream in streams:
            stream.join(WITHIN_S)
            assert stream.finish == "abort"
            versions = [chunk["choices"][0]["weight_version"] for chunk in stream.chunks]
            assert {version["label"] for version in versions if version is not None} == {"initial"}
        stage.assert_serves("initial")


@pytest.mark.parametrize("by", ["a signal to the server", "a call"])
def test_an_engine_that_is_stopped_in_the_middle_ends_at_once(
    models: Models, short_path: Path, zygote: Zygote, asking: ThreadPoolExecutor, by: str
) -> None:
    with staged(zygote, short_path, models, pace_bytes_per_s=SLOW / 10) as stage:
        stage.offer("step_1", seed=1)
        update: Future[httpx.Response] = asking.submit(stage.ask, timeout_s=600.0)
        stage.until_open()
        if by == "a call":
            stopping = threading.Thread(target=stage.served.engine.stop)
            stopping.start()
        else:
            stopping = stage.served.thread
            stage.served.end()
        stopping.join(WITHIN_S)
        assert not stopping.is_alive()
        assert update.result(WITHIN_S).status_code == 503
        stage.offer("step_2", seed=2)  # nobody holds the first any more


@contextmanager
def offering(cli: Cli, place: Path, *arguments: object) -> Iterator[Command]:
    """`liveweight offer`, once it offers."""
    with cli.started(place, "offer", *arguments) as source:
        line = source.first_line()
        assert re.match(rf"offering step_\d+ at ipc://{place}", line), line + source.errors
        yield source


def test_the_programs_serve_offer_and_update(models: Models, short_path: Path, cli: Cli) -> None:
    address, secret = f"ipc://{short_path}/s/source.sock", secret_file(short_path)
    source = (models.directory(seed=1), "--version", "step_1", "--address", address, "--secret-file", secret)
    with cli.serving(short_path, models.directory(), "--weights-from", address) as (url, _):
        with offering(cli, short_path, *source) as first:
            taken = cli.run(short_path, "update", url)
            again = cli.run(short_path, "update", url, "--version", "step_1", "--pause", "keep")
            unknown = cli.run(short_path, "update", url, "--version", "step_2")
            wrong = cli.run(short_path, "update", url, "--transfer-mode", "pigeon")
            assert_ends_well(first, signal.SIGINT)
        gone = cli.run(short_path, "update", url)
        served_text = said(url)["weight_version"]["label"]
        with offering(cli, short_path, *source) as second:
            assert_ends_well(second, signal.SIGTERM)
    wanted = r"open (\d+)/\1 · staged \d+\.\d MB · verified 2/2 · voted 2/2 · commit \d+\.\d ms"
    line, result = taken.stdout.splitlines()
    assert re.fullmatch(wanted, line), taken.stderr
    assert re.fullmatch(rf"{url} serves step_1, digest [0-9a-f]{{32}}", result)
    assert again.stdout.splitlines()[0].endswith(" · installed already")
    assert (unknown.returncode, gone.returncode, wrong.returncode) == (1, 1, 2)
    assert unknown.stderr.startswith("LW-105 ")
    assert "asked for step_2, the source offers step_1. Still serving step_1. What to do: " in unknown.stderr
    assert gone.stderr.startswith("LW-205 ")
    assert ". Still serving step_1. What to do: " in gone.stderr
    assert served_text == "step_1"
    assert list((short_path / "s").iterdir()) == []


def assert_ends_well(source: Command, number: signal.Signals) -> None:
    """At that signal, without a message."""
    source.send_signal(number)
    code, _ = source.ended()
    assert (code, source.errors) == (0, "")


def test_a_publisher_refuses_what_contradicts_itself(models: Models, short_path: Path) -> None:
    model = models.directory()
    place: dict[str, Any] = {"secret": secret_file(short_path), "directory": short_path / "t"}
    address = f"ipc://{short_path}/source.sock"
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "without engines"),
        ({"dtype": "float32"}, "a dtype is for a source"),
        ({"address": address, "offer": "live", "engines": ["ipc:///nowhere"]}, "read frozen offers"),
        ({"address": address, "dtype": "int8"}, "cannot be offered as int8"),
        ({"address": address, "quorum": 1}, "a quorum of 1 of 0"),
    ]
    for given, text in cases:
        with pytest.raises(lw.LiveWeightError, match=text):
            lw.Publisher(model, **place, **given)
    with lw.Publisher(model, address=address, **place) as publisher:
        with pytest.raises(lw.LiveWeightError, match="has no engines"):
            publisher.publish(1)
        with pytest.raises(lw.LiveWeightError, match="without a round"):
            publisher.wait()
    assert not Path(address.removeprefix("ipc://")).exists()
