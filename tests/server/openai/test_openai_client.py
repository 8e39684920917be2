"""OpenAI's own client against the routes: whatever it understands must be true."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest

from liveweight.server.openai.generation_requests import completion_requests
from liveweight.server.openai.request_types import CompletionRequest
from tests.support.engine.echo_engine import CHOSEN, LAYERS, EchoEngine

TEXT = "the quick brown fox 東京 🙂 jumps"
HELLO: Any = [{"role": "user", "content": "hello, 東京"}]


def test_a_completion_has_text_usage_and_the_weights_it_came_from(
    client: openai.OpenAI, engine: EchoEngine
) -> None:
    answer = client.completions.create(model=engine.name, prompt=TEXT, max_tokens=8, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "text_completion"
    assert answer.model == engine.name
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode(TEXT))
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)
    assert choice.model_extra["weight_version"] == {  # type: ignore[index]
        "label": "initial",
        "digest": "0" * 32,
        "number": None,
    }
    assert "weight_spans" not in (choice.model_extra or {})


def test_a_streamed_completion_is_the_plain_one_in_pieces(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "prompt": TEXT, "max_tokens": 30, "seed": 7, "logprobs": 2}
    plain = client.completions.create(**wish)
    chunks = list(client.completions.create(**wish, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    whole = plain.choices[0].logprobs
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(chunk.choices[0].logprobs, name) or [] for chunk in chunks]
        assert [entry for piece in pieces for entry in piece] == getattr(whole, name)


def test_a_stream_tells_the_usage_in_a_last_chunk_if_asked(client: openai.OpenAI, engine: EchoEngine) -> None:
    options: Any = {"include_usage": True}
    wish: Any = {"model": engine.name, "stream": True, "stream_options": options, "max_tokens": 5}
    for chunks in (
        list(client.completions.create(prompt=TEXT, **wish)),
        list(client.chat.completions.create(messages=HELLO, **wish)),
    ):
        *others, last = chunks
        assert all(chunk.usage is None for chunk in others)
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 5


def test_a_chat_is_answered_plain_and_in_pieces(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "messages": HELLO, "max_tokens": 20, "seed": 3}
    plain = client.chat.completions.create(**wish)
    message = plain.choices[0].message
    assert (plain.object, message.role) == ("chat.completion", "assistant")
    chunks = list(client.chat.completions.create(**wish, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == len(engine.tokenizer.encode_chat(HELLO))


def test_an_answer_can_be_sent_back_as_part_of_the_conversation(
    client: openai.OpenAI, engine: EchoEngine
) -> None:
    wish: Any = {"model": engine.name, "max_tokens": 4}
    said = client.chat.completions.create(messages=HELLO, **wish).choices[0].message
    again: Any = [*HELLO, said.model_dump(), {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    assert client.chat.completions.create(messages=again, **wish).choices[0].message.content


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_the_rest_of_the_context(
    client: openai.OpenAI, engine: EchoEngine
) -> None:
    extra = {"ignore_eos": True}
    completion = client.completions.create(model=engine.name, prompt=TEXT, extra_body=extra)
    chat = client.chat.completions.create(model=engine.name, messages=HELLO, extra_body=extra)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    assert chat.usage is not None
    assert chat.usage.total_tokens == engine.context


def test_logprobs_of_a_completion_line_up_with_its_text(client: openai.OpenAI, engine: EchoEngine) -> None:
    answer = client.completions.create(
        model=engine.name, prompt=TEXT, max_tokens=25, temperature=0, logprobs=3
    )
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == 25
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    for token, chosen, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == chosen
        assert len(top) in (3, 4)


def test_logprobs_of_a_chat_have_bytes_that_make_up_the_text(
    client: openai.OpenAI, engine: EchoEngine
) -> None:
    answer = client.chat.completions.create(
        model=engine.name, messages=HELLO, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    raw = b"".join(bytes(e.bytes or []) for e in logprobs.content if e.token not in special)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_what_a_request_with_its_own_seed_gives(
    client: openai.OpenAI, engine: EchoEngine, stream: bool
) -> None:
    wish: Any = {"model": engine.name, "max_tokens": 9}
    alone = [
        client.completions.create(prompt=prompt, seed=seed, **wish).choices[0].text
        for prompt in (TEXT, "other words")
        for seed in (40, 41, 42)
    ]
    together: dict[int, str] = {}
    both: Any = {"prompt": [TEXT, "other words"], "n": 3, "seed": 40, **wish}
    if stream:
        for chunk in client.completions.create(stream=True, **both):
            choice = chunk.choices[0]
            together[choice.index] = together.get(choice.index, "") + choice.text
    else:
        answer = client.completions.create(**both)
        together = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage is not None
        sizes = [len(engine.tokenizer.encode(text)) for text in (TEXT, "other words")]
        assert answer.usage.prompt_tokens == sum(sizes)
    assert [together[index] for index in sorted(together)] == alone
    assert len(set(alone)) > 2


def test_seeds_wrap_and_without_one_choices_differ(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "prompt": TEXT, "max_tokens": 9}
    assert client.completions.create(seed=2**64 - 1, n=2, **wish).choices[1].text
    assert client.completions.create(seed=-5, **wish).choices[0].text
    texts = {choice.text for choice in client.completions.create(n=32, **wish).choices}
    assert len(texts) > 2


def test_without_a_seed_every_choice_of_every_prompt_has_one_of_its_own(engine: EchoEngine) -> None:
    ids = [5, 6, 7]
    body = CompletionRequest.model_validate({"prompt": [ids] * 16, "n": 4})
    requests = asyncio.run(completion_requests(body, engine))
    assert [request.prompt for request in requests] == [ids] * 64
    assert len({request.sampling.seed for request in requests}) == 64


def test_with_a_seed_equal_prompts_have_equal_seeds(engine: EchoEngine) -> None:
    body = CompletionRequest.model_validate({"prompt": [[5, 6], [7], [5, 6]], "n": 2, "seed": 2**64 - 1})
    requests = asyncio.run(completion_requests(body, engine))
    assert [request.sampling.seed for request in requests] == [2**64 - 1, 0] * 3


def test_prompts_may_be_texts_or_ids_one_or_several(client: openai.OpenAI, engine: EchoEngine) -> None:
    ids = engine.tokenizer.encode(TEXT)
    forms: Any = [TEXT, ids, [TEXT], [ids], [TEXT, TEXT], [ids, ids]]
    answers = [
        client.completions.create(model=engine.name, prompt=prompt, max_tokens=6, temperature=0)
        for prompt in forms
    ]
    assert len({choice.text for answer in answers for choice in answer.choices}) == 1
    assert [len(answer.choices) for answer in answers] == [1, 1, 1, 1, 2, 2]


def test_token_ids_come_with_the_answer_if_asked(client: openai.OpenAI, engine: EchoEngine) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True}
    wish: Any = {"model": engine.name, "max_tokens": 7, "extra_body": extra, "seed": 1}
    completion: Any = client.completions.create(prompt=TEXT, **wish).choices[0]
    assert completion.prompt_token_ids == engine.tokenizer.encode(TEXT)
    assert engine.tokenizer.decode(completion.token_ids) == completion.text
    chat: Any = client.chat.completions.create(messages=HELLO, **wish)
    assert chat.prompt_token_ids == engine.tokenizer.encode_chat(HELLO)
    assert engine.tokenizer.decode(chat.choices[0].token_ids) == chat.choices[0].message.content
    for plain, chunks in (
        (completion, list(client.completions.create(prompt=TEXT, stream=True, **wish))),
        (chat.choices[0], list(client.chat.completions.create(messages=HELLO, stream=True, **wish))),
    ):
        pieces: list[Any] = [chunk.choices[0] for chunk in chunks]
        assert [id_ for piece in pieces for id_ in piece.token_ids] == plain.token_ids
        first: Any = chunks[0]
        prompt = getattr(first, "prompt_token_ids", None) or pieces[0].prompt_token_ids
        assert prompt in (engine.tokenizer.encode(TEXT), engine.tokenizer.encode_chat(HELLO))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, engine: EchoEngine, stream: bool
) -> None:
    wish: Any = {"model": engine.name, "prompt": TEXT, "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**wish).choices[0].text
    stop = whole[10:14]
    if stream:
        chunks = list(client.completions.create(stop=[stop, "never"], stream=True, **wish))
        text, finish = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(stop=stop, **wish).choices[0]
        text, finish = choice.text, choice.finish_reason
    assert (text, finish) == (whole[: whole.index(stop)], "stop")


def test_a_stop_token_ends_the_answer_and_has_no_text(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "prompt": TEXT, "max_tokens": 40, "temperature": 0}
    ask: Any = {"return_token_ids": True, "ignore_eos": True}
    whole: Any = client.completions.create(**wish, extra_body=ask).choices[0]
    end = whole.token_ids[5]
    ended: Any = client.completions.create(**wish, extra_body={**ask, "stop_token_ids": [end]}).choices[0]
    at = whole.token_ids.index(end)
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: at + 1]
    assert ended.text == engine.tokenizer.decode(whole.token_ids[:at])


@pytest.mark.parametrize("stream", [False, True])
def test_routed_experts_come_with_the_end_of_an_answer(
    client: openai.OpenAI, engine: EchoEngine, stream: bool
) -> None:
    extra = {"return_routed_experts": True}
    wish: Any = {"model": engine.name, "prompt": TEXT, "max_tokens": 4, "extra_body": extra}
    if stream:
        choices: list[Any] = [chunk.choices[0] for chunk in client.completions.create(stream=True, **wish)]
        assert [hasattr(choice, "routed_experts") for choice in choices] == [False] * 3 + [True]
        routed = choices[-1].routed_experts
    else:
        routed = client.completions.create(**wish).choices[0].model_extra["routed_experts"]
    tokens = len(engine.tokenizer.encode(TEXT)) + 3
    assert routed["shape"] == [tokens, LAYERS, CHOSEN]
    assert (routed["dtype"], len(base64.b64decode(routed["data"]))) == (
        "uint16",
        2 * tokens * LAYERS * CHOSEN,
    )


def test_variables_for_the_template_change_the_prompt(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "messages": HELLO, "max_tokens": 1}
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    answers = [client.chat.completions.create(**wish, extra_body=extra) for extra in ({}, variables)]
    sizes = [answer.usage.prompt_tokens for answer in answers if answer.usage is not None]
    assert sizes == [
        len(engine.tokenizer.encode_chat(HELLO)),
        len(engine.tokenizer.encode_chat(HELLO, {"enable_thinking": False})),
    ]


def test_a_repeated_prompt_says_how_much_of_it_was_cached(client: openai.OpenAI, engine: EchoEngine) -> None:
    wish: Any = {"model": engine.name, "prompt": TEXT * 3 + "!", "max_tokens": 1}
    usages = [client.completions.create(**wish).usage for _ in range(2)]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert details[0] is not None and details[0].cached_tokens == 0
    assert details[1] is not None and (details[1].cached_tokens or 0) > 0


def test_the_model_is_listed_and_found_by_name(client: openai.OpenAI, engine: EchoEngine) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [engine.name]
    assert client.models.retrieve(engine.name).id == engine.name
    assert (listed[0].model_extra or {})["max_model_len"] == engine.context
    assert (listed[0].model_extra or {})["logprobs_mode"] == "raw_logprobs"
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_errors_are_the_clients_own(client: openai.OpenAI, engine: EchoEngine) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="nothing", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=engine.name, prompt="word " * engine.context)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as limit:
        client.chat.completions.create(
            model=engine.name, messages=HELLO, max_completion_tokens=engine.context
        )
    assert (limit.value.code, limit.value.param) == ("context_length_exceeded", "max_tokens")
