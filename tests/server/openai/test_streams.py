"""Streams: the format to the byte, clients that leave, ranks that are lost, and two hundred at once."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from liveweight.engine.config import EngineConfig
from liveweight.errors import RankLost
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served, serving

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "the quick brown fox", "max_tokens": 200, "ignore_eos": True}


def events(answer: httpx.Response) -> list[str]:
    """The data of every event; each must be one line and an empty one."""
    parts = answer.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part.removeprefix("data: ") for part in parts]


def test_a_stream_is_events_of_one_line_with_done_at_the_end(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "line\nbreaks\r\n\n", "max_tokens": 9, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *chunks, done = events(answer)
    assert done == "[DONE]"
    assert {json.loads(chunk)["object"] for chunk in chunks} == {"text_completion"}
    assert len(chunks) == 9


def test_chunks_come_as_they_are_made(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    with own.openai() as client:
        chunks = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=True
        )
        assert next(iter(chunks)).choices[0].delta.role == "assistant"
        assert own.engine.status().counts.generated_tokens == 0
        own.engine.gate.set()
        assert len(list(chunks)) == 3


def test_weights_that_change_within_an_answer_are_told_in_spans(own: Served[EchoEngine]) -> None:
    own.engine.switch = {3: "w1@@aa", 5: "w@2@17@bb"}
    first, second, third = (
        {"label": label, "digest": digest, "number": number}
        for label, digest, number in (("initial", "0" * 32, None), ("w1", "aa", None), ("w@2", "bb", 17))
    )
    with own.http() as http:
        choice = http.post(COMPLETIONS, json={"prompt": "a b c", "max_tokens": 6}).json()["choices"][0]
        assert choice["weight_version"] == third
        assert "kv" not in choice
        assert choice["weight_spans"] == [
            {"from": 0, "weight_version": first},
            {"from": 3, "weight_version": second},
            {"from": 5, "weight_version": third},
        ]
        streamed = events(http.post(COMPLETIONS, json={"prompt": "a b c", "max_tokens": 6, "stream": True}))
    versions = [json.loads(event)["choices"][0]["weight_version"] for event in streamed[:-1]]
    assert versions == [first] * 3 + [second] * 2 + [third]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["running", "waiting"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_frees_its_requests(
    own: Served[EchoEngine], stream: bool, state: str, n: int
) -> None:
    own.engine.gate.clear()
    host, port = own.url.removeprefix("http://").split(":")
    ahead = {"prompt": "a", "max_tokens": 9, "n": 2, "ignore_eos": True} if state == "waiting" else None
    sockets = [_ask(host, int(port), body) for body in (ahead, {**LONG, "n": n, "stream": stream}) if body]
    expected = n + (2 if ahead else 0)
    own.engine.wait_for(lambda status: status.running + status.waiting == expected)
    sockets[-1].close()
    own.engine.wait_for(lambda status: status.running + status.waiting == expected - n)
    own.engine.gate.set()
    own.engine.wait_for(lambda status: status.blocks_free == status.blocks_total)
    for connected in sockets:
        connected.close()
    assert own.engine.status().counts.finished.get("abort") == n


def _ask(host: str, port: int, body: dict[str, Any]) -> socket.socket:
    sent = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    connected = socket.create_connection((host, port))
    connected.sendall(head.encode() + sent)
    return connected


def test_a_rank_lost_in_the_middle_is_an_event_and_there_is_no_done(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    error = RankLost("rank 1 ended with signal 9")
    with own.http() as http, http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
        own.engine.wait_for(lambda status: status.running == 1)
        own.engine.fail(error)
        answer.read()
    *_, last = events(answer)
    assert json.loads(last)["error"]["code"] == "LW-706"
    assert "rank 1" in json.loads(last)["error"]["message"]


def test_openais_client_raises_a_fault_in_the_middle_of_a_stream(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    with own.openai() as client:
        chunks = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "a"}], max_tokens=50, stream=True
        )
        next(iter(chunks))
        own.engine.wait_for(lambda status: status.running == 1)
        own.engine.fail(RankLost("rank 1 ended with signal 9"))
        with pytest.raises(openai.APIError, match="rank 1"):
            list(chunks)


def test_a_rank_lost_fails_plain_requests_and_later_ones(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=own.url, timeout=20) as http:
            asked = [asyncio.create_task(http.post(COMPLETIONS, json=LONG)) for _ in range(4)]
            await asyncio.to_thread(own.engine.wait_for, lambda status: status.running + status.waiting == 4)
            own.engine.fail(RankLost("rank 0 stopped answering"))
            return [*(await asyncio.gather(*asked)), await http.post(COMPLETIONS, json=LONG)]

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [503] * 5
    assert all("rank 0" in answer.json()["error"]["message"] for answer in answers)


@pytest.mark.parametrize(
    ("size", "param"), [({"prompt": ["a"] * 5}, "prompt"), ({"prompt": ["a", "b"], "n": 3}, "n")], ids=str
)
def test_more_answers_than_there_is_ever_room_for_are_a_400_that_takes_nothing(
    own: Served[EchoEngine], size: dict[str, Any], param: str
) -> None:
    with own.http() as http:
        answer = http.post(COMPLETIONS, json=size)
        assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).status_code == 200
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "takes 4 at once (2 that run and 2 that wait)" in answer.json()["error"]["message"]
    assert sum(own.engine.status().counts.finished.values()) == 4


def test_a_request_without_room_for_all_its_answers_begins_none(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    with own.http() as http, http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}):
        answer = http.post(COMPLETIONS, json={"prompt": ["a"] * 4})
        status = own.engine.status()
        own.engine.gate.set()
    assert answer.status_code == 429
    assert "leaves room for 3 of these 4" in answer.json()["error"]["message"]
    assert status.running + status.waiting == 1
    assert status.counts.finished == {}


def test_4096_prompts_are_one_request(model_dir: Path) -> None:
    with serving(EchoEngine(EngineConfig(model=str(model_dir)))) as running, running.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": [[5, 6]] * 4096, "max_tokens": 1}, timeout=60)
        many = http.post(COMPLETIONS, json={"prompt": [5, 6], "n": 1024, "max_tokens": 1}, timeout=60)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(4096))
    assert len(many.json()["choices"]) == 1024


def test_a_full_queue_is_a_429_and_takes_nothing_of_the_request(own: Served[EchoEngine]) -> None:
    own.engine.gate.clear()
    with own.http() as http, http.stream("POST", COMPLETIONS, json={**LONG, "n": 3, "stream": True}):
        own.engine.wait_for(lambda status: status.running + status.waiting == 3)
        for stream in (False, True):
            answer = http.post(COMPLETIONS, json={**LONG, "n": 2, "stream": stream})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        own.engine.wait_for(lambda status: status.running + status.waiting == 3)
    own.engine.wait_for(lambda status: status.running + status.waiting == 0)


def test_health_answers_while_long_prompts_are_tokenised(own: Served[EchoEngine]) -> None:
    async def ask() -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
            body = {"prompt": ["the quick brown fox " * 20_000] * 4}
            long = asyncio.create_task(http.post(COMPLETIONS, json=body))
            answered = 0
            while not long.done():
                assert (await http.get("/health")).status_code == 200
                answered += 1
            return answered, (await long).status_code

    answered, status = asyncio.run(ask())
    assert status == 400
    assert answered > 1


async def _stream(http: httpx.AsyncClient, index: int, leave: bool) -> str | None:
    body = {"prompt": f"client {index} says the quick brown fox", "max_tokens": 60, "temperature": 0}
    text: list[str] = []
    async with http.stream(
        "POST", COMPLETIONS, json={**body, "stream": True, "ignore_eos": True, "n": 1}
    ) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return "".join(text)
            text.append(json.loads(data)["choices"][0]["text"])
            if leave and len(text) > index % 20:
                return None
    raise EOFError("the stream ended early")


def test_of_200_streams_those_that_stay_are_whole_and_everything_comes_back(model_dir: Any) -> None:
    config = EngineConfig(model=str(model_dir), max_running=64, max_waiting=1024)
    engine = EchoEngine(config, pace_s=0.03)

    async def ask(url: str) -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            return await asyncio.gather(*(_stream(http, index, index % 3 == 0) for index in range(200)))

    with serving(engine) as served:
        texts = asyncio.run(ask(served.url))
        status = engine.wait_for(lambda now: now.running == now.waiting == 0)
    assert status.blocks_free == status.blocks_total
    for index, text in enumerate(texts):
        if index % 3 == 0:
            assert text is None
        else:
            ids = engine.tokenizer.encode(f"client {index} says the quick brown fox")
            assert text == engine.tokenizer.decode([ids[at % len(ids)] for at in range(60)])
    assert status.counts.finished["length"] >= 133
    assert status.counts.finished["abort"] > 0
