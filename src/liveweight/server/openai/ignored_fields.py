"""Ignored fields: fields of OpenAI's and vLLM's requests that this engine does not support. Accepted at their neutral value only.

One table; validation, the OpenAPI schema, the page and the tests derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

IgnoredFields = Mapping[str, tuple[Any, ...]]

_SAMPLING: IgnoredFields = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "use_beam_search": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
}
COMPLETION: IgnoredFields = {
    **_SAMPLING,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "echo": (None, False),
    "add_special_tokens": (None, True),
}
CHAT: IgnoredFields = {
    **_SAMPLING,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "metadata": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "echo": (None, False),
}
MESSAGE: IgnoredFields = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}


def without_ignored(data: Any, table: IgnoredFields) -> Any:
    """The body without the table's fields. One that asks for something is an error that names it."""
    if not isinstance(data, dict):
        return data
    for name, accepted in table.items():
        if name in data and not any(_same(data[name], value) for value in accepted):
            raise PydanticCustomError(
                "unsupported", "{name} is not supported; leave it out", {"name": name, "param": name}
            )
    return {name: value for name, value in data.items() if name not in table}


def add_to_schema(schema: dict[str, Any], table: IgnoredFields) -> None:
    """Say so in the OpenAPI schema."""
    for name, accepted in table.items():
        schema.setdefault("properties", {})[name] = {
            "title": name,
            "enum": list(accepted),
            "description": "Not supported: accepted at its neutral value only.",
        }


def _same(given: Any, neutral: Any) -> bool:
    """Equal as JSON: 0.0 is 0, but false is not."""
    return isinstance(given, bool) == isinstance(neutral, bool) and bool(given == neutral)
