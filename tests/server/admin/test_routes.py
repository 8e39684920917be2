"""The control routes: status codes for every state and input, keys, pauses, and requests that are ended by their ids."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.updates.leader_client import RoundSummary, UpdateStatus
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    KeyRefused,
    LiveWeightError,
    MessageInvalid,
    OutcomeUnknown,
    RankLost,
    RoundAborted,
    RoundOpen,
    WeightsPending,
    WrongState,
)
from liveweight.server.client import EngineClient, leader_of, wire_address
from liveweight.server.request_guard import CONTROL_PATHS, AccessRules
from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Version
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

COMPLETIONS, UNDO, PAUSE, ABORT = "/v1/completions", "/v1/weights/undo", "/v1/pause", "/v1/abort_requests"
LONG: dict[str, Any] = {
    "prompt": "the quick brown fox",
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
}
OLD, NEW = (
    Version(run="r", label=label, digest=label * 32, number=number) for number, label in enumerate("ab", 1)
)
ROUND = RoundSummary(version="b", outcome="committed", took_s=0.5, stall_s=0.001)


def engine_of(model_dir: Path, *, updates: bool = True, **settings: Any) -> EchoEngine:
    """An engine that says it serves NEW and can go back to OLD."""
    how = Updates(address="ipc:///run/me/engine.sock", secret_file="none") if updates else None
    engine = EchoEngine(EngineConfig(model=str(model_dir), updates=how, max_running=2, **settings))
    engine.reported = UpdateStatus(state="serving b", serving=NEW, undo=OLD, round=None, rounds=(ROUND,))
    return engine


@pytest.fixture
def live(model_dir: Path) -> Iterator[Served[EchoEngine]]:
    """A server whose engine takes updates."""
    with serving(engine_of(model_dir)) as running:
        yield running


class Stream(threading.Thread):
    """A client that streams; `begun` holds once it has a first token."""

    def __init__(self, url: str, **changes: object) -> None:
        super().__init__()
        self.chunks: list[dict[str, Any]] = []
        self.begun = threading.Event()
        self._url, self._body = url, {**LONG, "stream": True, **changes}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}{COMPLETIONS}", json=self._body, timeout=30) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(json.loads(line.removeprefix("data: ")))
                    self.begun.set()

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks)

    @property
    def finish(self) -> str | None:
        found: str | None = self.chunks[-1]["choices"][0]["finish_reason"]
        return found


def test_the_weights_are_told_with_their_rounds_and_the_leaders_address(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        answer = http.get("/v1/weights")
    assert answer.status_code == 200
    assert answer.json() == {
        "model": "echo",
        "tp": 1,
        "state": "serving b",
        "paused": "running",
        "version": {"run": "r", "label": "b", "digest": "b" * 32, "number": 2},
        "undo": {"run": "r", "label": "a", "digest": "a" * 32, "number": 1},
        "round": None,
        "rounds": [
            {
                "version": "b",
                "outcome": "committed",
                "took_s": 0.5,
                "stall_s": 0.001,
                "reason": None,
                "draft": None,
            }
        ],
        "address": "ipc:///run/me/engine.sock",
        "source": None,
        "kv_policy": "recompute",
        "draft": None,
        "draft_weights": "required",
        "transfer_mode": None,
        "snapshots": None,
        "recovery": None,
        "serving_s": 0.0,
        "pending": None,
        "asleep": [],
    }


@pytest.mark.parametrize(("kept", "expected"), [((), "current"), (("draft",), "kept")])
def test_an_engine_that_drafts_says_whether_its_draft_is_of_the_version(
    model_dir: Path, kept: tuple[str, ...], expected: str
) -> None:
    engine = engine_of(model_dir)
    engine.spec = msgspec.structs.replace(engine.spec, draft_layers=1)
    ended = dataclasses.replace(ROUND, kept=kept)
    engine.reported = dataclasses.replace(engine.reported, kept=kept, rounds=(ended,))
    with serving(engine) as served, served.http() as http:
        said = http.get("/v1/weights").json()
    assert said["draft"] == expected
    assert said["rounds"][0]["draft"] == ("kept" if kept else None)


def test_an_engine_without_updates_says_so_and_refuses_an_undo(model_dir: Path) -> None:
    with serving(engine_of(model_dir, updates=False)) as served, served.http() as http:
        said = http.get("/v1/weights").json()
        assert (said["address"], said["undo"], said["kv_policy"]) == (None, None, None)
        assert said["version"] == {"run": "start", "label": "initial", "digest": "0" * 32, "number": None}
        assert said["state"] == "serving initial"
        refused = http.post(UNDO)
        with pytest.raises(WrongState, match="without live updates"):
            wire_address(served.url, None, Deadline.after(10))
    assert refused.status_code == 409
    assert "without live updates" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("objection", "status", "code"),
    [
        (RoundOpen("echo", "trainer/1"), 409, "LW-106"),
        (WrongState("staging b over a", "undo"), 409, "LW-107"),
        (DeadlineExceeded("rank 1 to go back", 2.0), 504, "LW-301"),
        (OutcomeUnknown("the leader did not answer"), 504, "LW-602"),
        (RankLost("rank 1 ended"), 503, "LW-706"),
        (RoundAborted("the leader was closed"), 503, "LW-603"),
        (ChannelClosed("the leader is gone"), 503, "LW-205"),
        (LiveWeightError("something else"), 500, "LW-000"),
        (None, 200, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception | None) else str(value),
)
def test_an_undo_has_an_honest_status(
    live: Served[EchoEngine], objection: LiveWeightError | None, status: int, code: str | None
) -> None:
    live.engine.objection = objection
    with live.http() as http:
        answer = http.post(UNDO, json={"timeout_s": 5})
        again = http.post(UNDO) if objection is None else answer
    assert answer.status_code == status
    if code is None:
        assert (answer.json()["version"]["label"], answer.json()["undo"]) == ("a", None)
        assert again.status_code == 409
    else:
        assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("path", [UNDO, PAUSE, ABORT])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b'{"unknown": 1}', "unknown"),
        (b'{"timeout_s": 0}', "timeout_s"),
        (b'{"timeout_s": -1}', "timeout_s"),
        (b'{"timeout_s": 1e9}', "timeout_s"),
        (b'{"timeout_s": "5"}', "timeout_s"),
        (b'{"timeout_s": NaN}', "timeout_s"),
        (b'{"mode": "stop"}', "mode"),
        (b'{"mode": 1}', "mode"),
        (b'{"request_ids": "cmpl-1"}', "request_ids"),
        (b'{"request_ids": [1]}', "request_ids"),
    ],
)
def test_a_wrong_body_is_a_422_that_names_the_field(
    http: httpx.Client, path: str, body: bytes, param: str | None
) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    state = http.get("/v1/is_paused").json()
    problem = answer.json()["error"]
    assert (answer.status_code, problem["type"]) == (422, "invalid_request_error")
    assert (problem["param"] and problem["param"].partition("[")[0]) == param
    assert state == {"is_paused": False, "state": "running"}


def test_the_openai_routes_keep_their_400(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": 1}).status_code == 400


@pytest.mark.parametrize("body", [None, {}, {"mode": "keep"}, {"mode": None, "timeout_s": None}])
def test_a_kept_stream_stands_still_and_goes_on_to_the_same_answer(
    model_dir: Path, body: dict[str, Any] | None
) -> None:
    engine = engine_of(model_dir)
    engine.gate.clear()
    with serving(engine) as served, served.http() as http:
        stream = Stream(served.url)
        engine.wait_for(lambda status: status.running == 1)
        assert http.post(PAUSE, json=body).json() == {"is_paused": True, "state": "paused"}
        assert http.post(PAUSE).json() == {"is_paused": True, "state": "paused"}
        engine.gate.set()
        late = Stream(served.url)
        engine.wait_for(lambda status: status.running == 2)
        assert engine.status().counts.generated_tokens == 0
        assert http.get("/v1/weights").json()["paused"] == "paused"
        assert http.post("/v1/resume").json() == {"is_paused": False, "state": "running"}
        for client in (stream, late):
            client.join(20)
            assert client.finish == "length"
        whole = http.post(COMPLETIONS, json=LONG).json()["choices"][0]["text"]
    assert stream.text == late.text == whole


def test_a_pause_that_waits_is_a_504_until_requests_have_finished(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    engine.gate.clear()
    with serving(engine) as served, served.http() as http:
        stream = Stream(served.url)
        engine.wait_for(lambda status: status.running == 1)
        late = http.post(PAUSE, json={"mode": "wait", "timeout_s": 0.05})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "LW-301")
        assert http.get("/v1/is_paused").json() == {"is_paused": False, "state": "draining"}
        engine.gate.set()
        assert http.post(PAUSE, json={"mode": "wait"}).json()["is_paused"]
        stream.join(20)
    assert stream.finish == "length"


def test_while_pauses_wait_everything_else_answers(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    engine.gate.clear()
    with serving(engine) as served, served.http() as http:
        stream = Stream(served.url)
        engine.wait_for(lambda status: status.running == 1)
        waiting = [
            threading.Thread(target=httpx.post, args=(f"{served.url}{PAUSE}",), kwargs=kind)
            for kind in [{"json": {"mode": "wait", "timeout_s": 30}, "timeout": 40}] * 20
        ]
        for thread in waiting:
            thread.start()
        engine.wait_for(lambda status: status.paused == "draining")
        assert http.get("/health").status_code == 200
        assert http.get("/v1/weights").json()["paused"] == "draining"
        assert http.post(ABORT).json() == {"aborted": 1, "unknown": []}
        for thread in [*waiting, stream]:
            thread.join(20)
            assert not thread.is_alive()
    assert stream.finish == "abort"


def test_a_pause_that_aborts_gives_what_there_is(model_dir: Path) -> None:
    engine = EchoEngine(EngineConfig(model=str(model_dir)), context=100_000, pace_s=0.001)
    with serving(engine) as served, served.http() as http:
        stream = Stream(served.url, max_tokens=50_000)
        assert stream.begun.wait(20)
        assert http.post(PAUSE, json={"mode": "abort"}).json()["is_paused"]
        stream.join(20)
        http.post("/v1/resume")
    assert stream.finish == "abort"
    assert stream.text


def test_requests_are_ended_by_the_ids_of_their_answers(model_dir: Path) -> None:
    engine = EchoEngine(EngineConfig(model=str(model_dir)), context=100_000, pace_s=0.001)
    with serving(engine) as served, served.http() as http:
        first, second = (Stream(served.url, max_tokens=50_000, n=2) for _ in range(2))
        assert first.begun.wait(20)
        assert second.begun.wait(20)
        id_ = first.chunks[0]["id"]
        answer = http.post(ABORT, json={"request_ids": ["cmpl-0", id_, id_, "cmpl-0"]})
        assert answer.json() == {"aborted": 2, "unknown": ["cmpl-0"]}
        first.join(20)
        engine.wait_for(lambda status: status.running == 2)
        ends_s = (
            time.monotonic() + 20
        )  # the server forgets an answer after its last byte, which the client may have before
        while (again := http.post(ABORT, json={"request_ids": [id_]}).json()) != {
            "aborted": 0,
            "unknown": [id_],
        }:
            assert (again["unknown"], time.monotonic() < ends_s) == ([], True)
        assert http.post(ABORT, json={"request_ids": []}).json() == {"aborted": 0, "unknown": []}
        assert second.is_alive()
        assert http.post(ABORT, json={}).json() == {"aborted": 2, "unknown": []}
        second.join(20)
    assert (first.finish, second.finish) == ("abort", "abort")


def test_the_guard_knows_every_control_route(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    control = {
        path
        for path, methods in paths.items()
        if any("control" in method["tags"] for method in methods.values())
    }
    assert control == CONTROL_PATHS


@pytest.mark.parametrize(
    ("keys", "shown", "control", "other"),
    [
        ({}, None, 200, 200),
        ({"api_key": "a"}, None, 401, 401),
        ({"api_key": "a"}, "a", 200, 200),
        ({"control_key": "c"}, None, 401, 200),
        ({"control_key": "c"}, "c", 200, 200),
        ({"api_key": "a", "control_key": "c"}, "a", 401, 200),
        ({"api_key": "a", "control_key": "c"}, "c", 200, 401),
    ],
)
def test_control_routes_have_a_key_of_their_own(
    model_dir: Path, keys: dict[str, str], shown: str | None, control: int, other: int
) -> None:
    headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
    access = AccessRules(api_key=keys.get("api_key"), control_key=keys.get("control_key"))
    with serving(engine_of(model_dir), access=access) as served, served.http() as http:
        http.headers.update(headers)
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == other
        for path in CONTROL_PATHS:
            method = "GET" if path in ("/v1/weights", "/v1/is_paused") else "POST"
            refused = http.request(method, path).status_code == 401
            assert refused == (control == 401), path
        if control == 401:
            with pytest.raises(KeyRefused):
                EngineClient(served.url, shown).weights(Deadline.after(10))


def test_a_client_says_what_is_wrong_(live: Served[EchoEngine]) -> None:
    soon = Deadline.after(20)
    for url in ("http://", "http://a:b", "ftp://127.0.0.1", "127.0.0.1:8000"):
        with pytest.raises(MessageInvalid, match="is no URL"):
            EngineClient(url)
    with pytest.raises(ChannelClosed, match="cannot be reached"):
        wire_address("http://127.0.0.1:1", None, soon)
    with pytest.raises(MessageInvalid, match="is no engine of ours"):
        wire_address(f"{live.url}/somewhere", None, soon)
    with pytest.raises(
        ChannelClosed, match=r"nobody listens there now: its ranks are being started again, or"
    ):
        wire_address(live.url, None, soon)
    elsewhere = {"address": "ipc:///run/nowhere/engine.sock", "state": "serving initial"}
    with pytest.raises(ChannelClosed, match="which is not on this host"):
        leader_of("http://trainer-7:8000", elsewhere)
    live.engine.objection = RoundOpen("echo", "trainer/1")
    with pytest.raises(RoundOpen, match=r"echo is in a round of trainer/1$"):
        EngineClient(f"{live.url}/").undo(soon)


def test_an_engine_whose_ranks_are_being_started_again_is_not_said_to_be_elsewhere(
    live: Served[EchoEngine],
) -> None:
    live.engine.reported = dataclasses.replace(
        live.engine.reported, state="pending weights (rank 1 died)", serving=None
    )
    with pytest.raises(WeightsPending, match=r"pending weights \(rank 1 died\): its ranks are being started"):
        wire_address(live.url, None, Deadline.after(20))


def test_a_client_waits_no_longer_than_its_deadline() -> None:
    from liveweight.server.server import bind

    with bind("127.0.0.1", 0) as bound:
        bound.listen()  # and nobody answers
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="to answer GET /v1/weights"):
            EngineClient(url).weights(Deadline.after(0.05))
