"""Whatever is wrong with a request is answered in one shape, by the right status, naming the field; and the server goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from liveweight.server.field_types import MAX_PROMPTS
from liveweight.server.openai import ignored_fields
from tests.support.engine.echo_engine import EchoEngine
from tests.support.processes.http_server import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
INVALID = "invalid_request_error"
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class Case:
    """A body, and what is said of it."""

    body: dict[str, Any]
    param: str | None
    route: str = COMPLETIONS
    status: int = 400
    kind: str = INVALID


def completion(param: str, **fields: Any) -> Case:
    return Case({"prompt": "a", **fields}, param)


def chat(param: str, **fields: Any) -> Case:
    return Case({"messages": [{"role": "user", "content": "a"}], **fields}, param, CHAT)


CASES = {
    "model": Case({"prompt": "a", "model": "nothing"}, "model", status=404, kind="not_found_error"),
    "model of a chat": Case(
        {"messages": [{"role": "user", "content": "a"}], "model": "x"}, "model", CHAT, 404, "not_found_error"
    ),
    "model's type": completion("model", model=5),
    "no demand": completion("weight_version", weight_version={}),
    "a demand of a run alone": completion("weight_version", weight_version={"run": "r"}),
    "demand's type": completion("weight_version", weight_version=3),
    "demand's min": completion("weight_version.min", weight_version={"min": "3"}),
    "negative min": chat("weight_version.min", weight_version={"min": -1}),
    "unknown demand": chat("weight_version.max", weight_version={"min": 1, "max": 2}),
    "no prompt": Case({}, "prompt"),
    "empty text": completion("prompt", prompt=""),
    "empty list": completion("prompt", prompt=[]),
    "empty ids": completion("prompt", prompt=[[]]),
    "mixed prompts": completion("prompt", prompt=["a", [1]]),
    "ids and texts": completion("prompt", prompt=[1, "a"]),
    "fractional id": completion("prompt", prompt=[1.5]),
    "boolean id": completion("prompt", prompt=[True, 1]),
    "negative id": completion("prompt", prompt=[1, -1]),
    "id outside the vocabulary": completion("prompt", prompt=[10**9]),
    "huge id": completion("prompt", prompt=[10**40]),
    "prompt's type": completion("prompt", prompt={"a": 1}),
    "null prompt": completion("prompt", prompt=None),
    "half a surrogate": completion("prompt", prompt="\ud800"),
    "too many prompts": completion("prompt", prompt=["a"] * (MAX_PROMPTS + 1)),
    "long prompt": completion("prompt", prompt="word " * 300),
    "long ids": completion("prompt", prompt=[1] * 300),
    "too many tokens": completion("max_tokens", max_tokens=10**30),
    "no tokens": completion("max_tokens", max_tokens=0),
    "tokens as text": completion("max_tokens", max_tokens="5"),
    "fractional tokens": completion("max_tokens", max_tokens=5.5),
    "boolean tokens": completion("max_tokens", max_tokens=True),
    "negative temperature": completion("temperature", temperature=-0.1),
    "absurd temperature": completion("temperature", temperature=1e9),
    "temperature as text": completion("temperature", temperature="hot"),
    "top_p 0": completion("top_p", top_p=0),
    "top_p 2": completion("top_p", top_p=2),
    "top_k": completion("top_k", top_k=-2),
    "n 0": completion("n", n=0),
    "n 1025": completion("n", n=1025),
    "more answers than there is ever room for": completion("n", prompt=["a"] * 100, n=1000),
    "min_p above one": completion("min_p", min_p=1.1),
    "min_p below nothing": completion("min_p", min_p=-0.1),
    "no repetition penalty": completion("repetition_penalty", repetition_penalty=0),
    "repetition penalty as text": completion("repetition_penalty", repetition_penalty="1.1"),
    "logprobs mode": completion("logprobs_mode", logprobs_mode="raw_logits"),
    "seed": completion("seed", seed=2**64),
    "seed as text": completion("seed", seed="x"),
    "empty stop": completion("stop[0]", stop=""),
    "stop's type": completion("stop", stop=5),
    "stop's items": completion("stop[1]", stop=["a", 5]),
    "too many stops": completion("stop", stop=["a"] * 17),
    "stop ids": completion("stop_token_ids[0]", stop_token_ids=[-1]),
    "stream's type": completion("stream", stream="yes"),
    "options without a stream": completion("stream_options", stream_options={"include_usage": True}),
    "unknown option": completion("stream_options.x", stream=True, stream_options={"x": 1}),
    "logprobs": completion("logprobs", logprobs=21),
    "logprobs of a completion are a number": completion("logprobs", logprobs=True),
    "unknown field": completion("max_token", max_token=5),
    "echo": completion("echo", echo=True),
    "best_of": completion("best_of", best_of=2),
    "suffix": completion("suffix", suffix="x"),
    "penalty": completion("presence_penalty", presence_penalty=0.5),
    "penalty's type": completion("frequency_penalty", frequency_penalty=False),
    "bias": completion("logit_bias", logit_bias={"50256": -100}),
    "no messages": Case({}, "messages", CHAT),
    "empty messages": chat("messages", messages=[]),
    "messages' type": chat("messages", messages="hello"),
    "message's type": chat("messages[0]", messages=["hello"]),
    "no role": chat("messages[0].role", messages=[{"content": "a"}]),
    "unknown role": chat("messages[0].role", messages=[{"role": "king", "content": "a"}]),
    "no content": chat("messages[0].content", messages=[{"role": "user"}]),
    "content's type": chat("messages[0].content", messages=[{"role": "user", "content": 5}]),
    "half a surrogate in a message": chat(
        "messages[0].content", messages=[{"role": "user", "content": "\udfff"}]
    ),
    "half a surrogate in a part": chat(
        "messages[0].content", messages=[{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}]
    ),
    "image": chat("messages[0].content", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    "tool call": chat(
        "messages[1].tool_calls",
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "x"}]}],
    ),
    "unknown field of a message": chat("messages[0].x", messages=[{"role": "user", "content": "a", "x": 1}]),
    "alternatives without logprobs": chat("top_logprobs", top_logprobs=2),
    "logprobs of a chat are a switch": chat("logprobs", logprobs=2),
    "two limits": chat("max_tokens", max_tokens=5, max_completion_tokens=6),
    "tools": chat("tools", tools=[{"type": "function"}]),
    "response format": chat("response_format", response_format={"type": "json_object"}),
    "template variables' type": chat("chat_template_kwargs", chat_template_kwargs=[1]),
    "reserved template variable": chat(None, chat_template_kwargs={"messages": []}),  # type: ignore[arg-type]
    "half a surrogate in a variable": chat("chat_template_kwargs", chat_template_kwargs={"a": ["\ud800"]}),
    "both": chat("prompt", prompt="a"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_field_is_named(http: httpx.Client, name: str) -> None:
    case = CASES[name]
    sent = json.dumps(case.body).encode()
    answer = http.post(case.route, content=sent, headers={"content-type": "application/json"})
    assert answer.status_code == case.status, answer.text
    error = error_of(answer)
    assert (error["type"], error["param"]) == (case.kind, case.param), error


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, if it has the shape."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return dict(body["error"])


BODIES = {
    "nothing": b"",
    "not JSON": b"{'prompt': 1}",
    "cut off": b'{"prompt": "a"',
    "not text": b'{"prompt": "\xff"}',
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "very deep": DEEP.encode(),
    "deep in a field": b'{"prompt": "a", "chat_template_kwargs": ' + DEEP.encode() + b"}",
    "a number of many digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "a strange field": b'{"prompt": "a", "\\ud800\\n": 1}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, route: str, name: str) -> None:
    answer = http.post(route, content=BODIES[name], headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == INVALID


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_not_said_to_be_json_is_refused(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert (answer.status_code, "application/json" in error_of(answer)["message"]) == (400, True)


IGNORED = [
    (COMPLETIONS, name, value) for name, values in ignored_fields.COMPLETION.items() for value in values
]
IGNORED += [(CHAT, name, value) for name, values in ignored_fields.CHAT.items() for value in values]


@pytest.mark.parametrize(("route", "name", "value"), IGNORED)
def test_fields_that_ask_for_nothing_are_accepted(
    http: httpx.Client, route: str, name: str, value: object
) -> None:
    body = {"prompt": "a"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(route, json={**body, "max_tokens": 1, name: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("table", "route"), [(ignored_fields.COMPLETION, COMPLETIONS), (ignored_fields.CHAT, CHAT)]
)
def test_fields_that_ask_for_something_are_refused(
    http: httpx.Client, table: ignored_fields.IgnoredFields, route: str
) -> None:
    for name in table:
        body = {"prompt": "a"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        answer = http.post(route, json={**body, name: ["something"]})
        assert (answer.status_code, error_of(answer)["param"]) == (400, name)
        assert "not supported" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/nothing", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_routes_and_methods_are_told_in_the_same_shape(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    error_of(answer)
    assert ("allow" in answer.headers) == (status == 405)


def test_an_unexpected_error_says_nothing_of_the_inside(
    own: Served[EchoEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> int:
        raise KeyError("secret place")

    monkeypatch.setattr(own.engine, "submit", broken)
    with own.http() as http:
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            answer = http.post(COMPLETIONS, json=body)
            assert answer.status_code == 500
            assert error_of(answer) == {
                "message": "internal error; the server's log has it",
                "type": "server_error",
                "param": None,
                "code": "internal_error",
            }
    assert "secret place" in caplog.text
    monkeypatch.undo()
    with own.http() as http:
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_the_server_goes_on_after_all_of_it(http: httpx.Client, engine: EchoEngine) -> None:
    for case in CASES.values():
        http.post(
            case.route, content=json.dumps(case.body).encode(), headers={"content-type": "application/json"}
        )
    answer = http.post(COMPLETIONS, json={"prompt": "the quick brown fox", "max_tokens": 3, "temperature": 0})
    assert answer.status_code == 200
    assert (
        engine.wait_for(lambda status: status.running == status.waiting == 0).blocks_free
        == engine.total_blocks
    )
