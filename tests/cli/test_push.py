"""New weights into served engines, and what operators do there: real ranks, real rounds, the program's own commands."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import liveweight as lw
from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.engine import Engine
from liveweight.rounds.replica import WireReplica
from liveweight.server.request_guard import AccessRules
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages.values import RoundId
from tests.server.admin.test_routes import Stream
from tests.support.engine import noted_hooks
from tests.support.engine.engines import WITHIN_S, Models, forking
from tests.support.processes.cli import Cli
from tests.support.processes.fork_server import Zygote
from tests.support.processes.http_server import Served, serving

COMPLETIONS = "/v1/completions"
ASK: dict[str, Any] = {
    "prompt": "the quick brown fox",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


@contextmanager
def live(
    zygote: Zygote, place: Path, model: Path, access: AccessRules | None = None, **settings: Any
) -> Iterator[Served[Engine]]:
    """A served engine of two ranks that takes updates."""
    updates = Updates(
        address=f"ipc://{place}/{model.name}.sock", secret_file=str(secret_file(place)), **settings
    )
    config = EngineConfig(model=str(model), tp=2, threads=1, updates=updates)
    with Engine(config, launch=forking(zygote)) as engine, serving(engine, access) as served:
        yield served


def secret_file(place: Path) -> Path:
    """The default path of the secret."""
    return place / f"liveweight-{os.getuid()}" / "secret"


def said(url: str, **changes: Any) -> dict[str, Any]:
    """The first choice of an answer."""
    answer = httpx.post(f"{url}{COMPLETIONS}", json={**ASK, **changes}, timeout=WITHIN_S)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_a_push_changes_what_a_served_engine_says_and_an_undo_takes_it_back(
    models: Models, short_path: Path, zygote: Zygote, cli: Cli
) -> None:
    old, new, other = models.directory(), models.directory(seed=1), models.directory(tied=False)
    with live(zygote, short_path, new) as reference:
        expected = said(reference.url)["text"]
    with cli.serving(short_path, old) as (url, address):
        before = said(url)
        start = httpx.get(f"{url}/v1/weights").json()
        assert before["weight_version"] == {
            "label": "initial",
            "digest": start["version"]["digest"],
            "number": None,
        }
        assert (start["state"], start["version"]["run"], start["undo"]) == ("serving initial", "start", None)

        pushed = cli.run(short_path, "push", new, url, "--version", "step_1")
        assert pushed.returncode == 0, pushed.stderr
        wanted = r"open (\d+)/\1 · staged \d+\.\d MB · verified 2/2 · voted 2/2 · commit \d+\.\d ms"
        assert re.fullmatch(wanted, pushed.stdout.splitlines()[0]), pushed.stdout
        after, weights = said(url), httpx.get(f"{url}/v1/weights").json()
        assert after["text"] == expected != before["text"]
        assert weights["address"] == address
        assert address.startswith(f"ipc://{secret_file(short_path).parent}/engine-")
        version = {name: weights["version"][name] for name in ("label", "digest", "number")}
        assert (
            version
            == after["weight_version"]
            == {
                "label": "step_1",
                "digest": version["digest"],
                "number": 1,
            }
        )
        assert weights["undo"] == start["version"]
        assert [(row["version"], row["outcome"]) for row in weights["rounds"]] == [("step_1", "committed")]

        refused = cli.run(short_path, "push", other, url, "--version", "step_2")
        assert refused.returncode == 1
        assert refused.stderr.startswith("LW-101 refused: ")
        assert ". Still serving step_1. What to do: publish exactly " in refused.stderr
        assert said(url)["text"] == expected

        undone = cli.run(short_path, "undo", url)
        assert undone.stdout == f"{url} serves initial\n", undone.stderr
        assert said(url)["text"] == before["text"]
        again = cli.run(short_path, "undo", url)
        assert (again.returncode, again.stderr.partition(" ")[0]) == (1, "LW-107")


def test_the_options_of_rounds_reach_the_ranks_and_a_run_holds_across_pushes(
    models: Models, short_path: Path, cli: Cli
) -> None:
    options = ["--draft-weights", "keep", "--shadow", "host", "--hook", f"{noted_hooks.__name__}:first"]
    notes, without = short_path / "notes", models.directory(seed=1)
    notes.mkdir()
    environment = {noted_hooks.DIRECTORY: str(notes)}
    named = ("--run", "experiment", "--version", "step_1")
    with cli.serving(short_path, models.directory(mtp=True), *options, **environment) as (url, _):
        pushed = cli.run(short_path, "push", without, url, *named)
        assert pushed.returncode == 0, pushed.stderr
        assert re.match(r"open 46/(58|59|6\d) · draft kept · staged ", pushed.stdout), pushed.stdout
        weights = httpx.get(f"{url}/v1/weights").json()
        assert (weights["version"]["run"], weights["version"]["label"]) == ("experiment", "step_1")
        assert (weights["draft"], weights["draft_weights"]) == ("kept", "keep")
        assert weights["rounds"][-1]["draft"] == "kept"
        again = cli.run(short_path, "push", without, url, *named)
        assert "installed already" in again.stdout, again.stderr
        other = cli.run(short_path, "push", models.directory(seed=2), url, *named)
        assert (other.returncode, "LW-104" in other.stderr) == (1, True)
        elsewhere = cli.run(short_path, "push", models.directory(seed=2), url, "--version", "step_1")
        assert elsewhere.returncode == 0, elsewhere.stderr  # a run of its own
    ran = [file.read_text().count('"hook": "first"') for file in notes.iterdir()]
    assert ran == [3, 3]  # the start and two commits, on both ranks


def test_status_is_a_table_or_json_and_pause_and_resume_say_what_came_of_them(
    models: Models, short_path: Path, zygote: Zygote, cli: Cli
) -> None:
    model, nobody = models.directory(), "http://127.0.0.1:1"
    with live(zygote, short_path, model) as served:
        url = served.url
        table = cli.run(short_path, "status", url, nobody)
        listed = cli.run(short_path, "status", "--json", url)
        paused = cli.run(short_path, "pause", url, "--mode", "wait")
        stood_still = served.engine.status().paused
        resumed = cli.run(short_path, "resume", url)
        went_on = served.engine.status().paused
    assert [row.split()[:3] for row in table.stdout.splitlines()] == [
        ["engine", "model", "version"],
        [url, model.name, "initial"],
        [nobody, "-", "-"],
    ]
    assert table.returncode == 1
    assert table.stderr.startswith(f"LW-205 {nobody} cannot be reached")
    assert (listed.returncode, [row["url"] for row in json.loads(listed.stdout)]) == (0, [url])
    assert (stood_still, went_on) == ("paused", "running")
    assert (paused.stdout, resumed.stdout) == (f"{url} is paused\n", f"{url} is running\n")


def test_one_push_updates_several_engines(models: Models, short_path: Path, zygote: Zygote, cli: Cli) -> None:
    new = models.directory(seed=1)
    with ExitStack() as stack:
        urls = [
            stack.enter_context(live(zygote, short_path, models.directory(seed=seed))).url for seed in (0, 2)
        ]
        pushed = cli.run(short_path, "push", new, *urls, "--version", "7", "--no-verify")
        assert pushed.returncode == 0, pushed.stderr
        lines = pushed.stdout.splitlines()
        assert sorted(line.partition(": ")[0] for line in lines[:2]) == sorted(urls)
        assert all("not verified · voted 2/2 · commit" in line for line in lines[:2])
        first, second = (said(url) for url in urls)
    assert first["text"] == second["text"]
    assert first["weight_version"] == second["weight_version"]


class HeldReplica(WireReplica):
    """A replica whose vote is requested only when the test allows it."""

    def __init__(self, address: str, place: Path) -> None:
        super().__init__(address, load_or_create_secret(secret_file(place)))
        self.at_vote, self.go_on = threading.Event(), threading.Event()

    def vote(self, round_id: RoundId, lease_s: float, deadline: Deadline) -> None:
        self.at_vote.set()
        assert self.go_on.wait(WITHIN_S)
        super().vote(round_id, lease_s, deadline)


def test_health_and_weights_answer_during_a_round_and_an_undo_is_refused(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with live(zygote, short_path, models.directory()) as served, served.http() as http:
        held = HeldReplica(served.engine.address or "", short_path)
        with lw.Publisher(
            models.directory(seed=1), engines=[held], secret=secret_file(short_path), lease_s=60.0
        ) as publisher:
            publisher.offer("step_1")
            assert held.at_vote.wait(WITHIN_S)
            health, weights, undo = (
                http.get("/health"),
                http.get("/v1/weights"),
                http.post("/v1/weights/undo"),
            )
            before = said(served.url)
            held.go_on.set()
            publisher.wait()
        after = http.get("/v1/weights").json()
    assert (health.status_code, health.json()["weight_version"]["label"]) == (200, "initial")
    assert weights.status_code == 200
    assert (weights.json()["version"]["label"], weights.json()["rounds"]) == ("initial", [])
    assert weights.json()["round"] is not None
    assert (undo.status_code, undo.json()["error"]["code"]) == (409, "LW-106")
    assert before["weight_version"]["label"] == "initial"
    assert (after["round"], after["version"]["label"]) == (None, "step_1")


def test_a_publisher_finds_an_engine_by_its_url_and_its_control_key(
    models: Models, short_path: Path, zygote: Zygote, cli: Cli
) -> None:
    access = AccessRules(api_key="a", control_key="c")
    more: dict[str, Any] = {"secret": secret_file(short_path), "directory": short_path / "trainer"}
    with live(zygote, short_path, models.directory(), access) as served:
        for key in (None, "a"):
            with pytest.raises(lw.LiveWeightError, match="key"):
                lw.Publisher(models.directory(seed=1), engines=[served.url], control_key=key, **more)
        with lw.Publisher(
            models.directory(seed=1), engines=[served.url], control_key="c", **more
        ) as publisher:
            report = publisher.publish(3)
        shown = {"authorization": "Bearer c"}
        weights = httpx.get(f"{served.url}/v1/weights", headers=shown).json()
        refused = cli.run(short_path, "pause", served.url)
        paused = cli.run(short_path, "pause", served.url, LIVEWEIGHT_CONTROL_KEY="c")
    assert weights["version"] == {
        "run": publisher.run,
        "label": 3,
        "digest": report.version.digest,
        "number": 1,
    }
    assert (refused.returncode, refused.stderr.partition(" ")[0]) == (1, "LW-207")
    assert paused.stdout == f"{served.url} is paused\n"


def test_a_stream_across_a_push_says_which_tokens_came_from_which_weights(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with live(zygote, short_path, models.directory(), kv_policy="reuse") as served, served.http() as http:
        stream = Stream(served.url, **{**ASK, "max_tokens": 200})
        assert stream.begun.wait(WITHIN_S)
        http.post("/v1/pause")  # it would finish before a round, on a machine with nothing else to do
        with lw.Publisher(
            models.directory(seed=1), engines=[served.url], secret=secret_file(short_path)
        ) as publisher:
            report = publisher.publish("step_1")
        http.post("/v1/resume")
        stream.join(WITHIN_S)
    versions = [chunk["choices"][0]["weight_version"] for chunk in stream.chunks]
    labels = [version["label"] for version in versions if version is not None]
    assert labels == sorted(labels)
    assert set(labels) == {"initial", "step_1"}
    assert versions[-1] == {"label": "step_1", "digest": report.version.digest, "number": 1}
    assert stream.chunks[-1]["choices"][0]["kv"] == "reused"
    assert "kv" not in stream.chunks[0]["choices"][0]


def test_a_paused_stream_stops_and_then_goes_on_to_its_whole_answer(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    long: dict[str, Any] = {**ASK, "max_tokens": 200}
    with live(zygote, short_path, models.directory()) as served, served.http() as http:
        whole = said(served.url, **long)["text"]
        stream = Stream(served.url, **long)
        assert stream.begun.wait(WITHIN_S)
        assert http.post("/v1/pause", json={"mode": "keep"}).json()["is_paused"]
        still = served.engine.status()
        for _ in range(20):
            assert http.get("/v1/is_paused").json()["is_paused"]
        assert served.engine.status().counts == still.counts
        assert (still.running, stream.is_alive()) == (1, True)
        assert http.post("/v1/resume").json()["state"] == "running"
        stream.join(WITHIN_S)
    assert (stream.finish, stream.text) == ("length", whole)


def test_a_pause_that_aborts_returns_the_tokens_there_are(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with live(zygote, short_path, models.directory()) as served, served.http() as http:
        whole = said(served.url)["text"].rstrip("\ufffd")
        streams = [Stream(served.url, **{**ASK, "max_tokens": 1500}) for _ in range(2)]
        for stream in streams:
            assert stream.begun.wait(WITHIN_S)
        assert http.post("/v1/pause", json={"mode": "abort"}).json()["is_paused"]
        for stream in streams:
            stream.join(WITHIN_S)
            assert stream.finish == "abort"
            text = stream.text.rstrip("\ufffd")
            assert text
            assert whole.startswith(text) or text.startswith(whole)
        http.post("/v1/resume")
        assert said(served.url)["text"].rstrip("\ufffd") == whole


def test_requests_of_a_real_engine_are_ended_by_their_ids(
    models: Models, short_path: Path, zygote: Zygote
) -> None:
    with live(zygote, short_path, models.directory()) as served, served.http() as http:
        stream = Stream(served.url, **{**ASK, "max_tokens": 1500})
        assert stream.begun.wait(WITHIN_S)
        ids = [stream.chunks[0]["id"], "cmpl-none"]
        answer = http.post("/v1/abort_requests", json={"request_ids": ids}).json()
        stream.join(WITHIN_S)
    assert answer == {"aborted": 1, "unknown": ["cmpl-none"]}
    assert stream.finish == "abort"
