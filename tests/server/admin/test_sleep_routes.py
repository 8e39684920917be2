"""`POST /v1/sleep` and `/v1/wakeup`, the commands for them, and `status` over several engines: an engine that answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from liveweight.cli import exit_codes
from liveweight.cli.main import app
from liveweight.engine.config import EngineConfig
from liveweight.errors import LiveWeightError, RoundOpen, SnapshotDamaged, WrongState
from liveweight.server.admin.fleet_status import with_behind
from tests.arch.source_tree import ROOT
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

BOTH = ["weight", "kv_cache"]


@pytest.fixture
def nap(model_dir: Path) -> Any:
    """A server of the test's own."""
    with serving(EchoEngine(EngineConfig(model=str(model_dir)))) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "asleep"), [(None, BOTH), ({}, BOTH), ({"tags": ["kv_cache"], "timeout_s": 5}, ["kv_cache"])]
)
def test_sleep_and_wakeup_say_what_is_asleep(nap: Served[EchoEngine], body: Any, asleep: list[str]) -> None:
    with nap.http() as http:
        slept = (
            http.post("/v1/sleep", json=body).json() if body is not None else http.post("/v1/sleep").json()
        )
        again = http.post("/v1/sleep", json={"tags": asleep}).json()
        woken = http.post("/v1/wakeup").json()
    assert (slept["asleep"], slept["changed"], slept["size_bytes"]) == (asleep, asleep, 1000 * len(asleep))
    assert (again["asleep"], again["changed"]) == (asleep, [])
    assert (woken["asleep"], woken["changed"]) == ([], asleep)


@pytest.mark.parametrize("body", [{"tags": ["lora"]}, {"tags": "weight"}, {"tag": []}, {"timeout_s": 0}])
@pytest.mark.parametrize("route", ["/v1/sleep", "/v1/wakeup"])
def test_a_wrong_nap_is_a_422_and_changes_nothing(nap: Served[EchoEngine], route: str, body: Any) -> None:
    with nap.http() as http:
        assert http.post(route, json=body).status_code == 422
    assert nap.engine.asleep == frozenset()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RoundOpen("a", "trainer"), 409),
        (WrongState("asleep", "sleep"), 409),
        (SnapshotDamaged("d", ["part"]), 502),
    ],
)
def test_a_nap_that_does_not_come_has_an_honest_status(
    nap: Served[EchoEngine], error: LiveWeightError, status: int
) -> None:
    nap.engine.objection = error
    with nap.http() as http:
        answers = [http.post(route) for route in ("/v1/sleep", "/v1/wakeup")]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert answers[0].json()["error"]["code"] == error.code


def test_the_commands_say_what_came_of_it(nap: Served[EchoEngine]) -> None:
    run = CliRunner().invoke
    slept = run(app, ["sleep", nap.url, "--tag", "kv_cache"])
    woken = run(app, ["wakeup", nap.url])
    assert slept.stdout.startswith(f"{nap.url} is asleep: kv_cache · 0.0 MB in ")
    assert woken.stdout.startswith(f"{nap.url} is awake · ")


def test_the_page_names_every_field_of_naps_and_weights() -> None:
    from liveweight.server.admin.sleep_routes import SleepAnswer, SleepRequest
    from liveweight.server.response_types import WeightsAnswer

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    fields = [*SleepRequest.model_fields, *WeightsAnswer.__annotations__]
    assert [field for field in fields if f"`{field}`" not in page] == []
    assert [field for field in SleepAnswer.__annotations__ if f'"{field}"' not in page] == []


def status_answer(
    label: str | int, serving_s: float = 1.0, number: int | None = None, **more: Any
) -> dict[str, Any]:
    run = "start" if label == "initial" else "r"
    version = {"run": run, "label": label, "digest": str(label), "number": number}
    return {"url": str(label), "version": version, "serving_s": serving_s, "recovery": None, **more}


def test_who_is_behind_is_told_beside_the_newest() -> None:
    gone, missed = {"url": "x", "error": "LW-205"}, {"behind": {"label": "step_9"}}
    rows = with_behind(
        [status_answer("x", 1.0, 2), status_answer("a", 50.0, 10), status_answer("initial"), gone]
    )
    assert [one["behind"] for one in rows] == ["a", None, "a", None]
    unnumbered = with_behind([status_answer("step_2"), status_answer("step_10", 50.0)])
    assert [one["behind"] for one in unnumbered] == [None, "step_2"]  # the one that came last
    assert [one["behind"] for one in with_behind([status_answer("initial"), status_answer("initial")])] == [
        None,
        None,
    ]
    assert [one["behind"] for one in with_behind([status_answer("step_8", recovery=missed)])] == ["step_9"]


def test_status_shows_who_is_behind_and_its_json_says_so(nap: Served[EchoEngine], model_dir: Path) -> None:
    with serving(EchoEngine(EngineConfig(model=str(model_dir)))) as other:
        table = CliRunner().invoke(app, ["status", nap.url, other.url])
        listed = CliRunner().invoke(app, ["status", "--json", nap.url, other.url])
    assert (table.exit_code, listed.exit_code) == (exit_codes.DONE, exit_codes.DONE)
    heads = table.stdout.splitlines()[0].split("  ")
    assert {"behind", "stall"} <= {head.strip() for head in heads}
    assert [one["behind"] for one in json.loads(listed.stdout)] == [None, None]
