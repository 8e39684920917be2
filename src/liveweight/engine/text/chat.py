"""Chat templates: a conversation to the text that a model was trained on.

Owns finding, compiling and rendering. Templates come with the model and run in jinja2's sandbox, with what transformers gives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from liveweight.engine.text.files import first_line, read_text, special_tokens, tokenizer_config
from liveweight.errors import CheckpointInvalid, MissingExtra, RequestInvalid

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that are the template's input; a request cannot set them by the way."""


class ChatTemplate:
    """A compiled template with the model's special tokens. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = _environment()
        try:
            self._template: Template = environment.from_string(source)
        except Exception as error:  # a template may break its compiler in many ways
            raise CheckpointInvalid(f"the chat template cannot be compiled: {first_line(error)}") from error
        self._variables = dict(variables or {})

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """The template of a model directory; None if it has none. CheckpointInvalid if it is broken."""
        config = tokenizer_config(directory)
        path = directory / "chat_template.jinja"
        source = read_text(path) if path.is_file() else _default_of(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens(config))

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation as text, up to where the answer begins. RequestInvalid if the template refuses it."""
        given = dict(variables or {})
        taken = sorted(RESERVED & set(given))
        if taken:
            raise RequestInvalid(f"chat_template_kwargs cannot set {', '.join(taken)}")
        everything = {**self._variables, **given}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **everything,
            )
        except Exception as error:  # whatever a template does with what it was not written for
            raise RequestInvalid(f"the chat template refuses these messages: {first_line(error)}") from error


def _default_of(template: object) -> str | None:
    """The template among what the configuration has: a text, or a list of named ones."""
    match template:
        case str(source):
            return source
        case list(named):
            found = {entry["name"]: entry["template"] for entry in named if _is_named(entry)}
            return found.get("default")
        case _:
            return None


def _is_named(entry: object) -> bool:
    match entry:
        case {"name": str(), "template": str()}:
            return True
        case _:
            return False


def _environment() -> ImmutableSandboxedEnvironment:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from liveweight.engine.text.generation import GenerationBlock
    except ModuleNotFoundError as error:
        raise MissingExtra("a chat template", "engine") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: jinja2's own would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise RequestInvalid(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # the local time, as transformers gives it
