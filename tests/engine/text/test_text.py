"""Text to tokens and back: as transformers does it, and the same in pieces as at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from liveweight.engine.text import ChatTemplate, TextStream, Tokenizer
from liveweight.errors import CheckpointInvalid, RequestInvalid
from tests.support.engine.tokenizer_dirs import (
    CHATML,
    CORPUS,
    byte_level,
    write,
    write_byte_level,
    write_with_fallback,
)

WRITERS: dict[str, Callable[[Path], Path]] = {"byte level": write_byte_level, "fallback": write_with_fallback}
TEXTS = [
    *CORPUS,
    "",
    " leading and trailing ",
    "line\r\nbreaks\n\n\n\t tabs",
    "<|im_start|>user\nhi<|im_end|>",
    "<s>not the first</s>",
    "e\u0301 composes, \u200d joins, \U0001f9d1\u200d\U0001f680 flies",
    "a b a b",
]


@pytest.fixture(scope="module", params=sorted(WRITERS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = reference(text)["input_ids"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, special=False) == reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.size == len(reference)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_ids_decode_as_in_transformers(
    tokenizer: Tokenizer, reference: Any, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that is complete first; of several that end together, before the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def pieces(stream: TextStream, ids: Sequence[int]) -> Iterator[str]:
    for id_ in ids:
        text, stopped = stream.push(id_)
        yield text
        if stopped:
            break
    yield stream.finish()


@given(data=st.data())
@settings(max_examples=600, deadline=None)
def test_the_pieces_are_the_whole_text_cut_at_the_first_stop_string(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    known = st.integers(0, tokenizer.size + 3)  # and some that a padded vocabulary has
    written = st.text(max_size=30).map(tokenizer.encode)
    several = st.lists(written, max_size=3).map(lambda parts: list(chain.from_iterable(parts)))
    ids = data.draw(st.one_of(st.lists(known, max_size=40), several))
    whole = tokenizer.decode(ids)
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda at: st.integers(1, 6).map(lambda size: whole[at : at + size])
    )
    stop = data.draw(st.lists(st.one_of(inside, st.text("ab \n\ufffd", max_size=3)), max_size=3))
    stop = [text for text in stop if text]
    assert "".join(pieces(TextStream(tokenizer, stop), ids)) == cut(whole, stop)


@given(ids=st.lists(st.integers(0, 255), max_size=60))
@example(ids=[0xF0, 0x9F, 0x99, 0x82])
@settings(max_examples=300, deadline=None)
def test_a_byte_level_stream_is_never_more_than_a_character_behind(ids: list[int]) -> None:
    tokenizer = BYTES
    stream = TextStream(tokenizer)
    sent = ""
    for at, id_ in enumerate(ids):
        sent += stream.push(id_)[0]
        behind = tokenizer.decode(ids[: at + 1])
        assert behind.startswith(sent.rstrip("\ufffd"))
        assert len(behind) - len(sent) <= 3


BYTES = Tokenizer(byte_level(), decoders=["ByteLevel"])


def test_an_end_that_may_begin_a_stop_string_is_held_back_until_it_is_decided() -> None:
    def said(text: str, stop: Sequence[str]) -> list[str]:
        stream = TextStream(BYTES, stop)
        ids = [BYTES.encode(character, special=False)[0] for character in text]
        return list(pieces(stream, ids))

    assert said("xENy", ["END"]) == ["x", "", "", "ENy", ""]
    assert said("xEND!", ["END"]) == ["x", "", "", "", ""]
    assert said("xEN", ["END"]) == ["x", "", "", "EN"]
    assert said("aab", ["ab", "b"]) == ["", "a", "", ""]
    assert "".join(said("abcd", ["abcd", "c"])) == "ab"


def test_after_a_stop_string_there_is_no_more() -> None:
    stream = TextStream(BYTES, ["b"])
    ids = BYTES.encode("b", special=False)
    assert stream.push(ids[0]) == ("", True)
    assert stream.push(ids[0]) == ("", True)
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["plain words", "東京", "🙂", "naïve café"])
def test_the_bytes_of_tokens_are_the_texts_bytes(tokenizer: Tokenizer, text: str) -> None:
    joined = b"".join(tokenizer.bytes_of(id_) for id_ in tokenizer.encode(text, special=False))
    assert joined.removeprefix(b" ") == text.encode()


def test_special_and_unknown_tokens_have_no_text_but_a_name() -> None:
    special = BYTES.encode("<|im_end|>")[0]
    assert BYTES.silent(special)
    assert BYTES.bytes_of(special) == b"<|im_end|>"
    assert BYTES.silent(10**6)
    assert BYTES.bytes_of(10**6) == b""
    assert not BYTES.silent(BYTES.encode("<think>")[0])


def test_truncation_that_a_file_asks_for_is_not_done(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=64)
    loaded = Tokenizer.load(write(tmp_path, made))
    assert loaded.decode(loaded.encode(CORPUS[0])) == CORPUS[0]


TEMPLATES = {
    "chatml": CHATML,
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}\n{{ messages | tojson(indent=2) }}",
    "special tokens": "{{ eos_token }}{{ bos_token }}{{ pad_token }}{{ messages[0]['content'] | trim }}",
    "strftime": "{{ strftime_now('%Y') }} {{ messages | length }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "whitespace": "  {% if true %}\n  a\n  {% endif %}\n  {{- messages[0].content }}  \n",
}
MESSAGES = [
    [{"role": "user", "content": " hi <b>&'\" "}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1? <|im_end|>"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "東京 🙂\n"},
    ],
]


@pytest.mark.parametrize("messages", MESSAGES, ids=["one", "four"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_becomes_what_transformers_makes_of_it(
    tmp_path: Path, name: str, messages: list[dict[str, str]]
) -> None:
    from transformers import AutoTokenizer

    directory = write_byte_level(tmp_path, TEMPLATES[name])
    loaded, reference = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert loaded.chat is not None
    assert loaded.chat.render(messages) == expected
    ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert loaded.encode_chat(messages) == ids


def test_variables_of_a_request_reach_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_byte_level(tmp_path)
    loaded, reference = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    ids = reference.apply_chat_template(MESSAGES[1], add_generation_prompt=True, enable_thinking=False)[
        "input_ids"
    ]
    assert loaded.encode_chat(MESSAGES[1], {"enable_thinking": False}) == ids
    assert ids != loaded.encode_chat(MESSAGES[1])


def test_named_templates_and_a_file_of_its_own_are_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    directory = write_byte_level(tmp_path, named)
    assert rendered(directory) == "d"
    (directory / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert rendered(directory) == "file"


def rendered(directory: Path) -> str | None:
    template = ChatTemplate.load(directory)
    return None if template is None else template.render([])


def test_a_model_without_template_refuses_a_chat(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_byte_level(tmp_path, None))
    with pytest.raises(RequestInvalid, match="no chat template"):
        loaded.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("source", "variables", "reason"),
    [
        ("{{ raise_exception('no system role') }}", {}, "no system role"),
        ("{{ messages[0].nothing }}", {}, "no element 0"),
        ("{{ messages.append(1) }}", {}, "append"),
        ("{{ ''.__class__.__mro__ }}", {}, "unsafe|undefined|__mro__"),
        ("{{ 1 // messages | length }}", {}, "zero"),
        ("", {"messages": []}, "cannot set messages"),
        ("{{ x | tojson }}", {"x": {1, 2}}, "serializable"),
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(
    source: str, variables: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestInvalid, match=reason) as caught:
        ChatTemplate(source).render([], variables)
    assert "\n" not in str(caught.value)


def spoil(file: str, text: str | bytes | None) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / file
        if text is None:
            path.unlink()
        else:
            path.write_bytes(text.encode() if isinstance(text, str) else text)

    return change


BROKEN = {
    "no tokenizer": (spoil("tokenizer.json", None), "tokenizer.json is missing"),
    "not JSON": (spoil("tokenizer.json", "{"), "tokenizer.json"),
    "not a tokenizer": (spoil("tokenizer.json", json.dumps({"model": 1})), "tokenizer.json"),
    "not text": (spoil("tokenizer.json", b"\xff\xfe"), "tokenizer.json"),
    "config not JSON": (spoil("tokenizer_config.json", "["), "tokenizer_config.json"),
    "config not an object": (spoil("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "template": (spoil("chat_template.jinja", "{% for %}"), "chat template"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    change, named = BROKEN[case]
    change(write_byte_level(tmp_path))
    with pytest.raises(CheckpointInvalid, match=named) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
