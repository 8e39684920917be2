"""FastDeploy's interface: its users' requests, its fields, its numbers; over an engine that answers at once, and its settings."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from liveweight.engine.config import EngineConfig, Updates
from liveweight.errors import EngineConfigInvalid, RoundOpen
from liveweight.integrations.fastdeploy.routes import PATHS, router_of
from liveweight.integrations.fastdeploy.settings import FastDeploySettings, settings_of
from liveweight.server.request_guard import AccessRules
from liveweight.spec.manifest import Version
from tests.server.admin.test_routes import Stream
from tests.support.engine.echo_engine import EchoEngine
from tests.support.engine.engines import WITHIN_S
from tests.support.processes.http_server import Served, serving

OFFERED = Version(run="r", label="step_100", digest="d" * 32)


@pytest.fixture
def served(model_dir: Path) -> Iterator[Served[EchoEngine]]:
    """An engine with a source, behind FastDeploy's routes."""
    updates = Updates(address="ipc:///nowhere", secret_file="/nowhere", source="ipc:///nowhere/source")
    engine = EchoEngine(EngineConfig(model=str(model_dir), tp=2, updates=updates), context=4096, pace_s=0.002)
    engine.offers.append(OFFERED)
    settings = FastDeploySettings(transfer_mode=None, release_cache=True)
    with serving(engine, AccessRules(control_paths=PATHS), first=[router_of(settings)]) as running:
        yield running


def test_the_seeds_own_curl_line_works(served: Served[EchoEngine]) -> None:
    line = [
        "curl",
        "-s",
        "-X",
        "POST",
        f"{served.url}/v1/update_weights",
        "-H",
        "Content-Type: application/json",
    ]
    body = '{"version": "step_100", "transfer_mode": "ipc"}'
    ran = subprocess.run([*line, "-d", body], capture_output=True, text=True, timeout=WITHIN_S, check=True)
    answer = json.loads(ran.stdout)
    assert (answer["status"], answer["error_message"]) == ("success", None)
    assert answer["request_id"].startswith("control-")
    assert [one["rank"] for one in answer["result"]] == [0, 1]
    first = answer["result"][0]
    assert {"sync_cost", "update_cost", "total_cost", "update_count"} <= first.keys()
    assert (first["version"], first["release_cache"]) == ("step_100", True)
    assert first["cache_clear_cost"] >= 0.0
    assert first["cache_rebuild_cost"] >= 0.0
    assert served.engine.paused == "running"
    assert served.engine.update_requests[-1].verify


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"version": 7}, "version must be a string"),
        ({"verify_checksum": "yes"}, "verify_checksum must be a boolean"),
        ({"transfer_mode": "pigeon"}, "transfer_mode must be one of"),
        ({"other": 1}, "unknown fields: other"),
        ([], "no JSON object"),
    ],
)
def test_an_update_that_is_asked_for_wrongly_is_a_400(
    served: Served[EchoEngine], body: Any, says: str
) -> None:
    with served.http() as http:
        answer = http.post("/v1/update_weights", json=body)
    assert (answer.status_code, answer.json()["status"]) == (400, "error")
    assert says in answer.json()["error_message"]
    assert served.engine.update_requests == []


def test_what_the_engine_refuses_is_told_in_its_shape(served: Served[EchoEngine]) -> None:
    served.engine.objection = RoundOpen("engine", "trainer")
    with served.http() as http:
        answer = http.post("/v1/sleep")
        missing = http.post("/v1/update_weights", json={"version": "step_7"})
    assert (answer.status_code, answer.json()["status"]) == (409, "error")
    assert "trainer" in answer.json()["error_message"]
    assert missing.status_code == 409


@pytest.mark.parametrize(
    ("asked", "asleep"),
    [
        ({}, ["weight", "kv_cache"]),
        ({"json": {"tags": "weight"}}, ["weight"]),
        ({"json": {"tags": ["kv_cache"]}}, ["kv_cache"]),
        ({"params": {"tags": "weight,kv_cache"}}, ["weight", "kv_cache"]),
    ],
)
def test_tags_come_as_words_lists_or_in_the_query(
    served: Served[EchoEngine], asked: dict[str, Any], asleep: list[str]
) -> None:
    with served.http() as http:
        slept = http.post("/v1/sleep", **asked)
        status = http.get("/v1/weight_status").json()["result"]
        woken = http.post("/v1/wakeup", **asked)
        again = http.get("/v1/weight_status").json()["result"]
    assert [one["asleep"] for one in slept.json()["result"]] == [asleep] * 2
    expected = (-2, "CLEARED") if "weight" in asleep else (0, "NORMAL")
    assert (status["weight_status"], status["weight_status_name"]) == expected
    assert (woken.status_code, again["weight_status"]) == (200, 0)


@pytest.mark.parametrize(
    ("tags", "says"),
    [(7, "Invalid parameter type"), (["lora"], "Unsupported tag"), ("lora", "Unsupported tag")],
)
def test_wrong_tags_are_a_400(served: Served[EchoEngine], tags: object, says: str) -> None:
    with served.http() as http:
        answer = http.post("/v1/sleep", json={"tags": tags})
    assert (answer.status_code, says in answer.json()["error_message"]) == (400, True)
    assert served.engine.asleep == frozenset()


def test_the_old_words_sleep_and_wake_up(served: Served[EchoEngine]) -> None:
    with served.http() as http:
        cleared = http.get("/clear_load_weight")
        updated = http.get("/update_model_weight")
    assert (cleared.status_code, cleared.json()["weight_status"]) == (200, -2)
    assert (updated.status_code, updated.json()["weight_status_name"]) == (200, "NORMAL")
    assert "msg" in updated.json()


def test_pause_resume_and_is_paused(served: Served[EchoEngine]) -> None:
    with served.http() as http:
        before = http.get("/v1/is_paused").json()["result"]
        paused = http.post("/v1/pause").json()
        during = http.get("/v1/is_paused").json()["result"]
        http.post("/v1/resume")
        after = http.get("/v1/is_paused").json()["result"]
    assert (paused["status"], paused["result"]) == ("success", None)
    assert [one["is_paused"] for one in (before, during, after)] == [False, True, False]


def test_requests_are_aborted_by_id_or_all_with_their_tokens_counted(served: Served[EchoEngine]) -> None:
    stream = Stream(served.url, prompt="the quick brown fox", max_tokens=3000, ignore_eos=True)
    assert stream.begun.wait(WITHIN_S)
    id_ = stream.chunks[0]["id"]
    with served.http() as http:
        wrong = http.post("/v1/abort_requests", json={})
        ended = http.post("/v1/abort_requests", json={"req_ids": [f"{id_}_0", "nobody"]}).json()["result"]
        stream.join(WITHIN_S)
        none = http.post("/v1/abort_requests", json={"abort_all": True}).json()["result"]
    assert (wrong.status_code, wrong.json()["error_message"]) == (
        400,
        "must provide abort_all=true or req_ids",
    )
    assert [one["request_id"] for one in ended["aborted"]] == [id_]
    assert ended["aborted"][0]["output_token_count"] > 0
    assert (ended["not_found"], none["aborted"]) == (["nobody"], [])
    assert stream.finish == "abort"


def test_settings_become_ours_or_a_line_says_why_they_need_not() -> None:
    given = {
        "transfer_mode": "gdr",
        "gpu_direct": True,
        "gdr_mtp_chunk_size": 1,
        "gdr_prefetch_queue_size": 2,
    }
    found = settings_of("rsync", json.dumps(given), {"FD_USE_CHECKPOINT_TRANSFER": "1", "PATH": "/bin"})
    assert (found.transfer_mode, found.release_cache) == ("gdr", False)
    assert [note.partition(":")[0] for note in found.notes] == [
        "gdr_mtp_chunk_size",
        "gdr_prefetch_queue_size",
        "FD_USE_CHECKPOINT_TRANSFER",
    ]
    assert settings_of(None, '{"gdr_release_cache": true}', {}).release_cache
    assert settings_of(None, '{"gpu_direct": false}', {}).transfer_mode == "rdma"
    assert settings_of("ipc_snapshot", None, {"FD_USE_CHECKPOINT_TRANSFER": "0"}) == FastDeploySettings(
        transfer_mode="ipc_snapshot"
    )


@pytest.mark.parametrize(
    ("strategy", "config", "says"),
    [
        ("pigeon", None, "pigeon"),
        (None, "{", "no JSON"),
        (None, "[]", "no JSON object"),
        (None, '{"colour": 1, "size": 2}', "unknown keys in --rsync-config: colour, size"),
        (None, '{"transfer_mode": "pigeon"}', "pigeon"),
        (None, '{"gpu_direct": 1}', "gpu_direct"),
        (None, '{"transfer_mode": "rdma", "gpu_direct": true}', "contradict"),
        (None, '{"gdr_release_cache": "no"}', "gdr_release_cache"),
    ],
)
def test_settings_that_nobody_knows_are_named(strategy: str | None, config: str | None, says: str) -> None:
    with pytest.raises(EngineConfigInvalid, match=says):
        settings_of(strategy, config, {})


def test_its_paths_need_the_control_key(model_dir: Path) -> None:
    engine = EchoEngine(EngineConfig(model=str(model_dir)))
    access = AccessRules(api_key="a", control_key="c", control_paths=PATHS)
    with serving(engine, access, first=[router_of(FastDeploySettings())]) as running:
        for path in ("/clear_load_weight", "/update_model_weight", "/v1/weight_status"):
            refused = httpx.get(f"{running.url}{path}", headers={"authorization": "Bearer a"})
            assert refused.status_code == 401
        shown = httpx.get(f"{running.url}/v1/weight_status", headers={"authorization": "Bearer c"})
    assert shown.json()["result"]["weight_status"] == 0
