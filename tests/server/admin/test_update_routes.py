"""`POST /v1/update_weights`: what it takes, what it answers, and an honest status for whatever comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from liveweight.engine.config import EngineConfig, Updates
from liveweight.engine.updates.requested_update import RequestedVersion
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    DigestMismatch,
    EngineConfigInvalid,
    EngineStopping,
    LiveWeightError,
    ManifestMismatch,
    OfferChanged,
    OutcomeUnknown,
    OutOfMemory,
    RankLost,
    RoundAborted,
    RoundFailed,
    RoundOpen,
    VersionNotOffered,
    WrongSecret,
    WrongState,
)
from liveweight.server.admin.call_ids import HEADER
from liveweight.server.admin.update_routes import MODES
from liveweight.server.client import EngineClient
from liveweight.server.request_guard import CONTROL_PATHS, AccessRules
from liveweight.spec.manifest import Version
from liveweight.transports.registry import TRANSPORTS
from tests.arch.source_tree import ROOT
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

UPDATE = "/v1/update_weights"
OLD, NEW = (Version(run="r", label=label, digest=label * 4) for label in ("a", "b"))


def engine_of(model_dir: Path, source: str | None = "ipc:///run/me/source.sock") -> EchoEngine:
    updates = Updates(address="ipc:///run/me/engine.sock", secret_file="none", source=source)
    engine = EchoEngine(EngineConfig(model=str(model_dir), tp=2, updates=updates))
    engine.offers = [OLD, NEW]
    return engine


@pytest.fixture
def live(model_dir: Path) -> Iterator[Served[EchoEngine]]:
    """A server whose engine has a source that offers two versions."""
    with serving(engine_of(model_dir)) as running:
        yield running


def failed(cause: LiveWeightError) -> RoundFailed:
    return RoundFailed(cause, replica="echo", rank=1, step="stage", waited_s=2.0, serving="a")


def test_an_update_is_answered_with_its_version_its_steps_and_every_ranks_costs(
    live: Served[EchoEngine],
) -> None:
    with live.http() as http:
        answer = http.post(UPDATE)
    said = answer.json()
    assert answer.status_code == 200
    assert said.pop("call_id") == answer.headers[HEADER] == live.engine.update_requests[0].call
    times = {"hold_s": 0.25, "stage_s": 1.5, "verify_s": 0.5, "pause_s": 0.0}
    more = {"vote_s": 0.01, "commit_s": 0.02, "stall_s": 0.002, "total_s": 2.5}
    ranks = [
        {
            "rank": rank,
            "version": "b",
            "sync_cost": 1.0 + rank,
            "update_cost": 0.25,
            "total_cost": 1.75 + rank,
            "stage_s": 1.0 + rank,
            "verify_s": 0.5,
            "swap_s": 0.25,
            "staged_bytes": 100,
        }
        for rank in range(2)
    ]
    assert said == {
        "version": {"run": "r", "label": "b", "digest": "bbbb", "number": None},
        "outcome": "committed",
        "round": "boot/1",
        "transfer_mode": "ipc",
        "verified": True,
        "tensors": 46,
        "draft": None,
        "steps": times | more,
        "results": ranks,
    }


def test_what_is_installed_already_is_a_success_without_a_round(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        first, again = (http.post(UPDATE, json={"version": "a"}) for _ in range(2))
    assert (first.json()["outcome"], again.json()["outcome"]) == ("committed", "unchanged")
    assert (again.status_code, again.json()["round"], again.json()["verified"]) == (200, None, False)
    assert [rank["total_cost"] for rank in again.json()["results"]] == [0.0, 0.0]
    assert first.headers[HEADER] != again.headers[HEADER]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, {}),
        ({}, {}),
        (
            dict.fromkeys(("version", "transfer_mode", "verify_checksum", "kv_policy", "pause", "timeout_s")),
            {},
        ),
        ({"version": "a"}, {"version": "a"}),
        ({"transfer_mode": "ipc"}, {"transfer_mode": "ipc"}),
        ({"verify_checksum": False}, {"verify": False}),
        ({"verify_checksum": True, "timeout_s": 5}, {"timeout_s": 5.0}),
        ({"kv_policy": "reuse", "pause": "abort"}, {"kv_policy": "reuse", "pause": "abort"}),
    ],
)
def test_every_field_reaches_the_engine(
    live: Served[EchoEngine], body: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    with live.http() as http:
        answer = http.post(UPDATE, json=body)
    assert answer.status_code == 200
    assert live.engine.update_requests == [RequestedVersion(call=answer.headers[HEADER], **expected)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"unknown": 1}', "unknown"),
        (b'{"call_id": "mine"}', "call_id"),
        (b'{"version": ""}', "version"),
        (b'{"version": true}', "version"),
        (b'{"version": 1.5}', "version"),
        (b'{"version": 9223372036854775808}', "version"),
        (b'{"version": ["a"]}', "version"),
        (b'{"transfer_mode": "carrier pigeon"}', "transfer_mode"),
        (b'{"transfer_mode": 1}', "transfer_mode"),
        (b'{"verify_checksum": "yes"}', "verify_checksum"),
        (b'{"kv_policy": "keep"}', "kv_policy"),
        (b'{"pause": true}', "pause"),
        (b'{"pause": "freeze"}', "pause"),
        (b'{"timeout_s": 0}', "timeout_s"),
        (b'{"timeout_s": 1e9}', "timeout_s"),
    ],
)
def test_a_wrong_body_is_a_422_that_names_the_field_and_begins_nothing(
    live: Served[EchoEngine], body: bytes, param: str | None
) -> None:
    with live.http() as http:
        answer = http.post(UPDATE, content=body, headers={"content-type": "application/json"})
    problem = answer.json()["error"]
    assert (answer.status_code, problem["type"]) == (422, "invalid_request_error")
    assert (problem["param"] and problem["param"].partition(".")[0]) == param
    assert live.engine.update_requests == []
    assert HEADER in answer.headers


def test_the_transfer_modes_are_those_of_the_registry(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    field = schemas["UpdateRequest"]["properties"]["transfer_mode"]
    assert field["anyOf"][0]["enum"] == MODES == sorted(TRANSPORTS)


@pytest.mark.parametrize(
    ("objection", "status", "code"),
    [
        (RoundOpen("echo", "operator/1"), 409, "LW-106"),
        (failed(RoundOpen("echo", "trainer/1")), 409, "LW-106"),
        (failed(ManifestMismatch(["model.norm.weight missing"])), 409, "LW-101"),
        (failed(OfferChanged("the source went on")), 503, "LW-403"),
        (failed(DigestMismatch(["w"], "echo, shadow")), 502, "LW-401"),
        (ChannelClosed("no source"), 503, "LW-205"),
        (WrongSecret("another secret"), 503, "LW-202"),
        (failed(ChannelClosed("the source is gone")), 503, "LW-205"),
        (failed(RoundAborted("given up")), 503, "LW-603"),
        (RankLost("rank 1 ended"), 503, "LW-706"),
        (EngineStopping("stopping"), 503, "LW-705"),
        (failed(DeadlineExceeded("rank 1 of echo to be staged", 2.0)), 504, "LW-301"),
        (DeadlineExceeded("the source to hold b", 2.0), 504, "LW-301"),
        (OutcomeUnknown("no answer"), 504, "LW-602"),
        (failed(OutOfMemory("no memory")), 500, "LW-502"),
    ],
    ids=lambda value: f"{type(value).__name__} {getattr(value, 'code', value)}",
)
def test_whatever_comes_of_it_has_an_honest_status(
    live: Served[EchoEngine], objection: LiveWeightError, status: int, code: str
) -> None:
    live.engine.objection = objection
    with live.http() as http:
        answer = http.post(UPDATE)
    problem = answer.json()["error"]
    assert (answer.status_code, problem["code"]) == (status, code)
    assert not problem["message"].startswith(code)
    if isinstance(objection, RoundFailed):
        assert "Still serving a" in problem["message"]
        assert problem["message"].endswith(objection.cause.remedy)
    with pytest.raises(LiveWeightError) as caught:
        EngineClient(live.url).update({}, 10.0)
    assert caught.value.code == code
    assert type(caught.value) is type(objection.cause if isinstance(objection, RoundFailed) else objection)


def test_a_version_that_is_not_offered_is_a_409_that_lists_what_is(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        answer = http.post(UPDATE, json={"version": "c"})
    problem = answer.json()["error"]
    assert (answer.status_code, problem["code"], problem["param"]) == (409, "LW-105", "version")
    assert problem["offered"] == ["a", "b"]
    with pytest.raises(VersionNotOffered, match=r"asked for c, the source offers a, b$"):
        EngineClient(live.url).update({"version": "c"}, 10.0)


def test_an_engine_without_a_source_or_without_updates_says_so(model_dir: Path) -> None:
    without = EchoEngine(EngineConfig(model=str(model_dir)))
    for engine in (engine_of(model_dir, source=None), without):
        with serving(engine) as served, served.http() as http:
            answer = http.post(UPDATE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, WrongState.code)
            assert http.get("/v1/weights").json()["source"] is None


def test_the_source_is_told_with_the_weights(live: Served[EchoEngine]) -> None:
    with live.http() as http:
        assert http.get("/v1/weights").json()["source"] == "ipc:///run/me/source.sock"


@pytest.mark.parametrize("source", ["", "http://127.0.0.1", "/run/me/source.sock"])
def test_a_source_must_have_an_address(source: str) -> None:
    with pytest.raises(EngineConfigInvalid, match="ipc://path"):
        Updates(address="ipc:///a", secret_file="none", source=source)


def test_every_control_call_has_an_id_of_its_own_whatever_its_answer(model_dir: Path) -> None:
    with serving(engine_of(model_dir), AccessRules(control_key="c")) as served, served.http() as http:
        refused = [http.post(path).headers[HEADER] for path in CONTROL_PATHS]
        http.headers["authorization"] = "Bearer c"
        mine = {HEADER: "mine"}
        answered = [http.get(path, headers=mine).headers[HEADER] for path in CONTROL_PATHS]
        other = http.get("/health")
    assert len({*refused, *answered}) == 2 * len(CONTROL_PATHS)
    assert "mine" not in answered
    assert HEADER not in other.headers


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    from liveweight.server.admin import update_routes as routes

    fields = [*routes.UpdateRequest.model_fields]
    for answer in (routes.UpdateAnswer, routes.StepsAnswer, routes.RankAnswer):
        fields += answer.__annotations__
    assert [field for field in fields if f"`{field}`" not in page] == []
    assert HEADER in page


def test_a_client_refuses_an_answer_that_is_none(live: Served[EchoEngine]) -> None:
    assert httpx.get(f"{live.url}/health").status_code == 200
    with pytest.raises(LiveWeightError, match="is no engine of ours"):
        EngineClient(f"{live.url}/v1").update({}, 10.0)
