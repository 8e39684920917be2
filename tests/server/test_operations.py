"""What those who run a server see: health in every state, metrics, keys, limits, and a page that says what is true."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from liveweight.engine.config import EngineConfig
from liveweight.errors import EngineConfigInvalid, LiveWeightError, RankLost
from liveweight.server.errors import TABLE
from liveweight.server.metrics import ENGINE_METRICS
from liveweight.server.openai import ignored_fields
from liveweight.server.request_guard import AccessRules
from liveweight.server.server import ServerTimes, bind
from tests.arch.source_tree import ROOT
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "the quick brown fox", "max_tokens": 200, "ignore_eos": True}
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def engine_of(model_dir: Path, **settings: Any) -> EchoEngine:
    return EchoEngine(EngineConfig(model=str(model_dir)), **settings)


def test_a_healthy_engine_tells_its_counts(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    with own.http() as http, http.stream("POST", COMPLETIONS, json={**LONG, "n": 3, "stream": True}):
        own.engine.wait_for(lambda status: status.waiting == 1)
        answer = http.get("/health")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["model"], body["tp"]) == ("ok", "echo", 1)
    assert (body["running"], body["waiting"]) == (2, 1)
    assert body["kv_blocks_free"] < body["kv_blocks_total"]
    assert "error" not in body


def test_a_lost_rank_is_named_for_a_moment_and_then_the_server_ends(model_dir: Path) -> None:
    with serving(engine_of(model_dir), times=ServerTimes(tell_fault_s=20.0)) as served:
        with served.http() as http:
            served.engine.fail(RankLost("rank 1 ended with signal 9"))
            answer = http.get("/health")
            assert answer.status_code == 503
            assert answer.json()["status"] == "failed"
            assert answer.json()["error"]["code"] == "LW-706"
            assert "rank 1" in answer.json()["error"]["message"]
        served.end()  # a signal cuts the moment short
    assert isinstance(served.fault, RankLost)


def test_a_server_that_lost_a_rank_ends_by_itself(model_dir: Path) -> None:
    with serving(engine_of(model_dir), times=ServerTimes(tell_fault_s=0.1)) as served:
        served.engine.fail(RankLost("rank 0 ended"))
        served.thread.join(10)
        assert not served.thread.is_alive()
    assert isinstance(served.fault, RankLost)


def test_told_to_end_it_refuses_new_requests_and_finishes_the_others(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    engine.gate.clear()
    with serving(engine, times=ServerTimes(grace_s=20.0)) as served, served.http() as http:
        answers: list[httpx.Response] = []
        asked = threading.Thread(target=lambda: answers.append(http.post(COMPLETIONS, json=LONG)))
        asked.start()
        engine.wait_for(lambda status: status.running == 1)
        served.end()
        engine.wait_for(lambda status: status.state == "stopping")
        with served.http() as late:
            refused = late.post(COMPLETIONS, json=LONG)
            health = late.get("/health")
        engine.gate.set()
        asked.join(10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "LW-705")
    assert refused.headers["retry-after"] == "1"
    assert (health.status_code, health.json()["status"]) == (503, "stopping")
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    assert served.fault is None


@pytest.mark.parametrize("hurry", [False, True])
def test_what_does_not_finish_in_time_is_answered_with_what_it_has(model_dir: Path, hurry: bool) -> None:
    engine = engine_of(model_dir)
    grace_s = 60.0 if hurry else 0.2
    with serving(engine, times=ServerTimes(grace_s=grace_s)) as served, served.http() as http:
        with http.stream("POST", COMPLETIONS, json={**LONG, "max_tokens": 150, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            engine.gate.clear()
            served.end()
            engine.wait_for(lambda status: status.state != "running")
            if hurry:
                served.end()
            rest = [line for line in lines if line]
        served.thread.join(10)
        assert not served.thread.is_alive()
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"abort"' in rest[-2] or '"finish_reason":"length"' in rest[-2]


def scrape(http: httpx.Client) -> dict[tuple[str, str], float]:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def test_metrics_follow_the_engine(own: Served[EchoEngine]) -> None:
    with own.http() as http:
        before = scrape(http)
        http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5, "ignore_eos": True})
        after = scrape(http)
    assert before["liveweight_engine_up", ""] == 1
    assert before["liveweight_engine_requests_finished_total", "length"] == 0
    assert after["liveweight_engine_requests_finished_total", "length"] == 1
    assert after["liveweight_engine_generated_tokens_total", ""] == 5
    assert after["liveweight_engine_requests", "running"] == 0
    assert {name for name, _ in after} == {metric.name for metric in ENGINE_METRICS}
    own.engine.fail(RankLost("rank 0"))
    with own.http() as http:
        assert scrape(http)["liveweight_engine_up", ""] == 0


def test_everything_but_health_needs_the_key(model_dir: Path) -> None:
    access = AccessRules(api_key="sk-schlüssel")
    with serving(engine_of(model_dir), access) as served, served.http() as http:
        right = {"authorization": "Bearer sk-schlüssel".encode()}
        routes = ("GET /metrics", "GET /v1/models", "GET /openapi.json", "GET /x", "POST /v1/completions")
        for route in routes:
            method, path = route.split()
            body = {"prompt": "a"} if method == "POST" else None
            wrongs: list[Any] = [{}, {"authorization": "Bearer sk"}, {"authorization": "Basic sk-schl"}]
            for headers in wrongs:
                answer = http.request(method, path, json=body, headers=headers)
                assert answer.status_code == 401, route
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            opened = http.request(method, path, json=body, headers=right)  # type: ignore[arg-type]
            assert opened.status_code == (404 if path == "/x" else 200)
        assert http.get("/health").status_code == 200
        assert http.get("/health/").status_code == 401


def test_openais_client_shows_its_key(model_dir: Path) -> None:
    import openai

    with serving(engine_of(model_dir), AccessRules(api_key="sk-1")) as served:
        with served.openai("sk-1") as right:
            assert right.models.list().data
        with served.openai("sk-2") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_refused(model_dir: Path, announced: bool) -> None:
    with serving(engine_of(model_dir), AccessRules(max_body_bytes=100_000)) as served, served.http() as http:
        body = b'{"prompt": "' + b"a" * 5_000_000 + b'"}'
        content: Any = body if announced else iter([body[:50_000], body[50_000:]])
        answer = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_a_body_that_does_not_come_is_given_up(model_dir: Path) -> None:
    with serving(engine_of(model_dir), AccessRules(body_timeout_s=0.2)) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_headers_beyond_the_limit_are_refused(own: Served[EchoEngine]) -> None:
    host, port = own.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as wide:
        wide.sendall(b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 70_000)
        wide.settimeout(10)
        assert wide.recv(100).startswith(b"HTTP/1.1 400")
    with own.http() as http:
        assert http.get("/health").status_code == 200


def test_an_address_that_is_taken_is_told(own: Served[EchoEngine]) -> None:
    port = int(own.url.rpartition(":")[2])
    with pytest.raises(EngineConfigInvalid, match=f"port {port}"):
        bind("127.0.0.1", port)
    with pytest.raises(EngineConfigInvalid, match=r"host\.invalid"):
        bind("host.invalid", 0)


def test_a_client_that_never_reads_does_not_keep_the_server_from_ending(model_dir: Path) -> None:
    engine = engine_of(model_dir, context=40_000)
    with serving(engine) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as deaf:
            body = b'{"prompt": "a", "max_tokens": 30000, "stream": true, "ignore_eos": true, "logprobs": 20}'
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            deaf.sendall(head.encode() + body)
            engine.wait_for(lambda status: status.counts.generated_tokens > 20_000, 20)
            served.end()
            served.thread.join(20)
            assert not served.thread.is_alive()


def test_the_page_lists_exactly_the_engines_metrics() -> None:
    rows = [
        (metric.name, metric.kind, "" if metric.label is None else f"`{metric.label}`", metric.meaning)
        for metric in ENGINE_METRICS
    ]
    assert re.findall(r"^\| `(liveweight_\w+)` \| (\w+) \| (\S*) ?\| (.+) \|$", PAGE, re.MULTILINE) == rows


def test_the_page_lists_exactly_the_errors() -> None:
    rows = {(cls.__name__, kind.status, kind.type) for cls, kind in TABLE.items()}
    found = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert {(name, int(status), kind) for status, kind, name in found} == rows
    for cls in TABLE:
        assert issubclass(cls, LiveWeightError) or cls.__module__ == "liveweight.server.errors"


def test_the_page_names_every_field(served: Served[EchoEngine]) -> None:
    with served.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "Message", "StreamOptions"):
        for field in schemas[name]["properties"]:
            assert f"`{field}`" in PAGE, field
    assert set(ignored_fields.COMPLETION) <= set(schemas["CompletionRequest"]["properties"])


def test_many_requests_leave_nothing_behind(own: Served[EchoEngine]) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=own.url, timeout=30) as http:
            for _ in range(10):
                asked = [http.post(COMPLETIONS, json={"prompt": "a", "n": 2}) for _ in range(2)]
                assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 2

    before = asyncio.run_coroutine_threadsafe(_tasks(), own.loop).result(10)
    asyncio.run(ask())
    assert asyncio.run_coroutine_threadsafe(_tasks(), own.loop).result(10) == before


async def _tasks() -> int:
    return len(asyncio.all_tasks()) - 1
