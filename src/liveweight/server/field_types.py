"""Types of request fields that have more than one form; each becomes one form here, with an error that names what is wrong."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 4096
MAX_STOPS = 16

_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompt: TypeAlias = str | list[int]


def wrong(message: str, *, param: str | None = None) -> PydanticCustomError:
    """A field that is refused; `param` names it if the error is raised for the object around it."""
    facts = {"message": message} if param is None else {"message": message, "param": param}
    return PydanticCustomError("value_error", "{message}", facts)


def _prompts(value: Any) -> list[Prompt]:
    """One text, one list of ids, or a list of either: as a list."""
    match value:
        case str():
            return [_text(value)]
        case [int(), *_]:
            return [_ids(value)]
        case [str(), *_] | [list(), *_] if len(value) > MAX_PROMPTS:
            raise wrong(f"at most {MAX_PROMPTS} prompts")
        case [str(), *_]:
            return [_text(text) for text in value]
        case [list(), *_]:
            return [_ids(ids) for ids in value]
    raise wrong("must be a string, a list of token ids, or a list of either")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise wrong("must be strings only, or lists of token ids only")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong("holds half of a surrogate pair, which is no text") from None
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or any(type(item) is not int or item < 0 for item in value):
        raise wrong("token ids must be whole numbers, at least one, none negative")
    return value


def _content(value: Any) -> Any:
    """The text of a message: as it is, or put together from its parts, a line each."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                texts.append(text)
            case _:
                raise wrong('parts of a message must be {"type": "text", "text": ...}')
    return "\n".join(texts)


def _variables(value: Any) -> Any:
    """Variables for the chat template; deep ones are refused, and so is what is no text."""
    match value:
        case dict():
            return {_text(key): _variables(item) for key, item in value.items()}
        case list():
            return [_variables(item) for item in value]
        case str():
            return _text(value)
        case _:
            return value


Text = Annotated[str, AfterValidator(_text)]
"""A string that can be written as UTF-8."""

Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
"""One or several prompts, each a text or a list of token ids."""

Stops = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=1000)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 1000},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 1000},
                    "maxItems": MAX_STOPS,
                },
            ]
        }
    ),
]
"""One or several stop strings."""

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    Text, BeforeValidator(_content), WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}]})
]
"""What a message says: a text, or text parts."""

Variables = Annotated[dict[str, Any], AfterValidator(_variables)]
"""A JSON object for the chat template."""
