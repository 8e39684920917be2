"""The real engine behind the real server: OpenAI's client beside HF transformers, two hundred streams, and bad input."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from liveweight.engine.engine import Engine
from tests.engine.test_engine import with_good_draft
from tests.server.openai.test_bad_input import BODIES, CASES, CHAT, COMPLETIONS, error_of
from tests.support.engine.engines import WITHIN_S, Models, first_difference, penalised
from tests.support.processes.fork_server import Zygote
from tests.support.processes.http_server import Served
from tests.support.processes.real_servers import Reference, quiet, serving_model

TEXTS = ("the quick brown fox", "Tokyo 東京 and 🙂", "def main():\n    return 1", "a")
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello, 東京"}]
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"tied": False}, {}),
    "dense on two ranks": ({}, {"tp": 2}),
    "with a draft on two ranks": ({"mtp": True}, {"tp": 2}),
    "experts on two ranks": ({"arch": "qwen3_moe"}, {"tp": 2}),
    "experts with a draft": ({"arch": "qwen3_moe", "mtp": True}, {}),
}
"""What the model is made with, and what the engine is started with."""


@dataclass(frozen=True)
class Running:
    """A server, a client of it, and who is to be believed."""

    served: Served[Engine]
    client: openai.OpenAI
    reference: Reference

    @property
    def engine(self) -> Engine:
        return self.served.engine

    def complete(self, **wish: Any) -> Any:
        """A completion, with its token ids."""
        extra = {"return_token_ids": True, **wish.pop("extra_body", {})}
        return self.client.completions.create(model=self.engine.name, extra_body=extra, **wish)

    def chat(self, **wish: Any) -> Any:
        """An answer in a conversation, with its token ids."""
        extra = {"return_token_ids": True}
        return self.client.chat.completions.create(model=self.engine.name, extra_body=extra, **wish)


@pytest.fixture(scope="session")
def references() -> Callable[[Path], Reference]:
    """transformers on a directory, loaded once."""
    loaded: dict[Path, Reference] = {}

    def of(directory: Path) -> Reference:
        if directory not in loaded:
            loaded[directory] = Reference(directory)
        return loaded[directory]

    return of


@pytest.fixture(scope="module", params=SETUPS)
def real(
    request: pytest.FixtureRequest, zygote: Zygote, models: Models, references: Callable[[Path], Reference]
) -> Iterator[Running]:
    """Each setup in turn."""
    model, settings = SETUPS[request.param]
    directory = models.directory(**model)
    with serving_model(zygote, directory, **settings) as served, served.openai() as client:
        yield Running(served, client.with_options(timeout=WITHIN_S), references(directory))
        quiet(served.engine)


def check_greedy(reference: Reference, prompt: list[int], ids: list[int], text: str, count: int) -> None:
    """The answer is the one that transformers generates; only two tokens that are as good may change places."""
    expected = reference.generate(prompt, count)
    if ids != expected:
        assert len(ids) <= count
        assert first_difference(reference.logits, prompt, ids) is None, (ids, expected)
    assert text == reference.decode(ids)


def test_greedy_completions_are_what_transformers_generates(real: Running) -> None:
    answer = real.complete(prompt=list(TEXTS), max_tokens=32, temperature=0)
    assert [choice.index for choice in answer.choices] == list(range(len(TEXTS)))
    for text, choice in zip(TEXTS, answer.choices, strict=True):
        prompt = real.reference.encode(text)
        assert choice.prompt_token_ids == prompt
        check_greedy(real.reference, prompt, choice.token_ids, choice.text, 32)
    counted = sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.completion_tokens == counted
    assert (real.engine.status().counts.drafted_tokens > 0) == (real.engine.spec.draft_layers > 0)


def test_greedy_answers_with_a_repetition_penalty_are_what_transformers_generates(real: Running) -> None:
    extra = {"repetition_penalty": 1.3}
    answer = real.complete(prompt=list(TEXTS), max_tokens=32, temperature=0, extra_body=extra)
    for text, choice in zip(TEXTS, answer.choices, strict=True):
        prompt = real.reference.encode(text)
        expected = real.reference.generate(prompt, 32, repetition_penalty=1.3)
        if choice.token_ids != expected:
            logits = penalised(real.reference.logits, 1.3)
            assert first_difference(logits, prompt, choice.token_ids) is None, (choice.token_ids, expected)


def test_min_p_and_a_repetition_penalty_are_in_processed_logprobs(real: Running) -> None:
    extra = {"repetition_penalty": 1.3, "min_p": 0.3, "logprobs_mode": "processed_logprobs"}
    wish: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "logprobs": 20}
    choice = real.complete(prompt=TEXTS[0], extra_body=extra, **wish).choices[0]
    prompt = real.reference.encode(TEXTS[0])
    table = penalised(real.reference.logits, 1.3)([*prompt, *choice.token_ids])[len(prompt) - 1 : -1] / 0.8
    for row, token, logprob in zip(table, choice.token_ids, choice.logprobs.token_logprobs, strict=True):
        row = row.masked_fill(row.softmax(-1) < 0.3 * row.softmax(-1).max(), -torch.inf).log_softmax(-1)
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)


def test_greedy_chats_are_what_transformers_generates(real: Running) -> None:
    answer = real.chat(messages=HELLO, max_tokens=32, temperature=0)
    prompt = real.reference.encode_chat(HELLO)
    assert answer.prompt_token_ids == prompt
    choice = answer.choices[0]
    check_greedy(real.reference, prompt, choice.token_ids, choice.message.content, 32)


def test_logprobs_of_completions_are_those_of_transformers(real: Running) -> None:
    choice = real.complete(prompt=TEXTS[0], max_tokens=24, seed=1, logprobs=3).choices[0]
    table = real.reference.logprobs(real.reference.encode(TEXTS[0]), choice.token_ids)
    logprobs = choice.logprobs
    expected = [float(row[token]) for row, token in zip(table, choice.token_ids, strict=True)]
    assert logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
    for row, name, told_of, top in zip(
        table, logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[name] == told_of
        others = sorted(top.values(), reverse=True)[: min(3, len(top))]
        assert others == pytest.approx(
            [float(value) for value in row.topk(3).values[: len(others)]], abs=1e-3
        )


def test_logprobs_of_chats_are_those_of_transformers(real: Running) -> None:
    answer = real.chat(messages=HELLO, max_tokens=24, seed=2, logprobs=True, top_logprobs=4)
    choice = answer.choices[0]
    table = real.reference.logprobs(answer.prompt_token_ids, choice.token_ids)
    for row, token, entry in zip(table, choice.token_ids, choice.logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        best = [float(value) for value in row.topk(4).values]
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.4])
def test_processed_logprobs_are_those_of_transformers_over_temperature(
    real: Running, temperature: float
) -> None:
    wish: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 6, "logprobs": 3}
    for mode in ("raw_logprobs", "processed_logprobs"):
        extra = {"logprobs_mode": mode}
        choice = real.complete(prompt=TEXTS[0], extra_body=extra, **wish).choices[0]
        heat = temperature if mode == "processed_logprobs" and temperature > 0 else 1.0
        prompt = real.reference.encode(TEXTS[0])
        table = real.reference.logits([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
        table = torch.log_softmax(table / heat, dim=-1)
        expected = [float(row[token]) for row, token in zip(table, choice.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_processed_logprobs_of_chats_leave_out_what_was_cut_off(real: Running) -> None:
    extra = {"logprobs_mode": "processed_logprobs", "top_k": 3, "return_token_ids": True}
    answer: Any = real.client.chat.completions.create(
        model=real.engine.name,
        messages=HELLO,
        max_tokens=16,
        seed=4,
        logprobs=True,
        top_logprobs=8,
        extra_body=extra,
    )
    choice = answer.choices[0]
    table = real.reference.logits([*answer.prompt_token_ids, *choice.token_ids])[
        len(answer.prompt_token_ids) - 1 : -1
    ]
    for row, entry in zip(table, choice.logprobs.content, strict=True):
        kept = row.topk(3).values.log_softmax(-1)
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(kept.tolist(), abs=1e-4)
        assert min(abs(entry.logprob - float(value)) for value in kept) < 1e-4


def test_streams_say_what_plain_answers_say(real: Running) -> None:
    wish: dict[str, Any] = {"max_tokens": 20, "seed": 5}
    plain = real.complete(prompt=TEXTS[1], logprobs=1, **wish).choices[0]
    pieces = [chunk.choices[0] for chunk in real.complete(prompt=TEXTS[1], logprobs=1, stream=True, **wish)]
    assert "".join(piece.text for piece in pieces) == plain.text
    assert [token for piece in pieces for token in piece.token_ids] == plain.token_ids
    streamed = [value for piece in pieces for value in piece.logprobs.token_logprobs]
    assert streamed == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
    assert pieces[-1].finish_reason == plain.finish_reason
    message = real.chat(messages=HELLO, **wish).choices[0].message.content
    chunks = real.chat(messages=HELLO, stream=True, stream_options={"include_usage": True}, **wish)
    *said, usage = chunks
    assert "".join(chunk.choices[0].delta.content for chunk in said) == message
    assert usage.usage.completion_tokens == sum(len(chunk.choices[0].token_ids) for chunk in said)


def test_every_choice_is_what_its_seed_gives_alone(real: Running) -> None:
    wish: dict[str, Any] = {"prompt": TEXTS[2], "max_tokens": 16, "top_p": 0.95}
    together = real.complete(n=4, seed=30, **wish)
    alone = [real.complete(seed=30 + choice, **wish).choices[0] for choice in range(4)]
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in alone]
    assert [choice.text for choice in together.choices] == [choice.text for choice in alone]
    assert len({choice.text for choice in alone}) == 4


def test_equal_prompts_differ_without_a_seed_and_repeat_with_one(real: Running) -> None:
    wish: dict[str, Any] = {"prompt": [[1, 2, 3]] * 64, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    free = [tuple(choice.token_ids) for choice in real.complete(**wish).choices]
    assert len(free) == 64
    assert len(set(free)) >= 60
    seeded = [[choice.token_ids for choice in real.complete(seed=9, **wish).choices] for _ in range(2)]
    assert seeded[0] == seeded[1] == [seeded[0][0]] * 64


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_real_answer_before_it(real: Running, stream: bool) -> None:
    wish: dict[str, Any] = {"prompt": TEXTS[0], "max_tokens": 32, "temperature": 0}
    whole = real.complete(**wish).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer = real.complete(stop=[stop, "never to be said"], stream=stream, **wish)
    pieces = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 2, 11, 12])
def test_the_experts_of_every_token_come_back(real: Running, length: int) -> None:
    extra = {"return_routed_experts": True, "ignore_eos": True}
    wish: dict[str, Any] = {"prompt": TEXTS[:2], "max_tokens": length, "temperature": 0, "extra_body": extra}
    if not real.engine.spec.sparse_layers:
        with pytest.raises(openai.BadRequestError, match="no experts"):
            real.complete(**wish)
        return
    for choice in real.complete(**wish).choices:
        check_experts(choice, real.engine, real.reference)


def check_experts(choice: Any, engine: Engine, reference: Reference) -> None:
    """The recorded experts are those that transformers' routers choose, for every token but the last."""
    through = [*choice.prompt_token_ids, *choice.token_ids[:-1]]
    routed, spec = choice.routed_experts, engine.spec
    assert routed["shape"] == [len(through), spec.sparse_layers, spec.experts_per_token]
    assert routed["dtype"] == "uint16"
    recorded = np.frombuffer(base64.b64decode(routed["data"]), dtype="<u2").reshape(routed["shape"])
    assert np.array_equal(np.sort(recorded, -1), np.sort(reference.experts(through), -1))


def test_experts_of_tokens_that_were_drafted_beyond_the_end_are_left_out(
    zygote: Zygote, models: Models, tmp_path: Path
) -> None:
    directory = with_good_draft(models.directory("qwen3_moe", mtp=True), tmp_path / "good")
    reference = Reference(directory)
    with serving_model(zygote, directory) as served, served.openai() as client:
        real = Running(served, client, reference)
        for length in range(1, 8):
            extra = {"return_routed_experts": True, "ignore_eos": True}
            answer = real.complete(prompt=list(TEXTS), max_tokens=length, temperature=0, extra_body=extra)
            for choice in answer.choices:
                assert len(choice.token_ids) == length
                check_experts(choice, served.engine, reference)
        counts = served.engine.status().counts
    assert counts.accepted_tokens > counts.drafted_tokens / 2


CLIENTS = 200
DISTINCT = 20
CROWDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "two ranks with a draft": ({"mtp": True}, {"tp": 2}),
    "pages that run out": ({}, {"kv_bytes": 2 * 4 * 2 * 16 * 16 * 4 * 80}),
}


def request_of(client: int, *, leaves: bool) -> dict[str, Any]:
    """One of a few different requests, greedy or seeded. Who leaves asks for more than it will ever see."""
    kind = client % DISTINCT
    how = {"temperature": 0} if kind % 2 else {"temperature": 1.0, "seed": kind}
    prompt = f"client {kind} says: " + "the quick brown fox " * (kind % 4)
    return {
        "prompt": prompt,
        "max_tokens": 1000 if leaves else 8 + kind,
        "ignore_eos": True,
        "stream": True,
    } | how


async def stream(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> str | None:
    """The whole text of a stream; None if the client left after so many chunks."""
    text: list[str] = []
    async with http.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return "".join(text)
            if data:
                text.append(json.loads(data)["choices"][0]["text"])
            if len(text) == leave_after:
                return None
    raise EOFError("the stream ended early")


async def crowd(url: str) -> tuple[list[str | None], list[str | None]]:
    """What each request gets alone, and what each client gets among all."""
    chance = random.Random(0)
    leaving = [
        (1 if client % 2 else chance.randint(2, 20)) if client % 3 == 0 else None for client in range(CLIENTS)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S, limits=limits) as http:
        alone = [await stream(http, request_of(kind, leaves=False)) for kind in range(DISTINCT)]
        together = [
            stream(http, request_of(client, leaves=after is not None), after)
            for client, after in enumerate(leaving)
        ]
        return alone, await asyncio.gather(*together)


@pytest.mark.parametrize("how", CROWDS)
def test_of_200_clients_those_that_stay_get_what_they_get_alone(
    zygote: Zygote, models: Models, how: str
) -> None:
    model, settings = CROWDS[how]
    with serving_model(zygote, models.directory(**model), max_running=64, **settings) as served:
        alone, together = asyncio.run(crowd(served.url))
        status = quiet(served.engine)
    left = [client for client in range(CLIENTS) if client % 3 == 0]
    expected = [None if client in left else alone[client % DISTINCT] for client in range(CLIENTS)]
    assert together == expected
    assert all(alone)
    assert status.counts.finished == {"length": DISTINCT + CLIENTS - len(left), "abort": len(left)}
    assert (status.counts.preemptions > 0) == (how == "pages that run out")


def test_bad_input_is_refused_and_the_real_engine_goes_on(zygote: Zygote, models: Models) -> None:
    good: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0}
    headers = {"content-type": "application/json"}
    with serving_model(zygote, models.directory(), tp=2, context=256) as served, served.http() as http:
        before = http.post(COMPLETIONS, json=good).json()["choices"]
        for name, case in CASES.items():
            answer = http.post(case.route, content=json.dumps(case.body).encode(), headers=headers)
            error = error_of(answer)
            assert (answer.status_code, error["type"], error["param"]) == (
                case.status,
                case.kind,
                case.param,
            ), name
        for route in (COMPLETIONS, CHAT):
            for name, body in BODIES.items():
                assert http.post(route, content=body, headers=headers).status_code == 400, name
        assert http.post(COMPLETIONS, json=good).json()["choices"] == before
        assert http.get("/health").status_code == 200
        assert quiet(served.engine).counts.finished == {"length": 2}
