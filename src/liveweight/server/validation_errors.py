"""Validation errors: a body that does not fit its schema, as one sentence that names the field."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.exceptions import RequestValidationError

from liveweight.server.errors import ApiError, BadRequest

_NOT_AN_OBJECT = frozenset({"missing", "model_attributes_type", "model_type", "dict_type"})


def refusal(error: RequestValidationError, refused: type[ApiError] = BadRequest) -> ApiError:
    """The first thing that is wrong, as this class of error."""
    first = error.errors()[0]
    kind, path, facts = str(first["type"]), list(first["loc"])[1:], first.get("ctx", {})
    if "param" in facts:
        path.append(facts["param"])
    param = param_of(path)
    if kind == "json_invalid":
        reason = facts.get("error", "it cannot be parsed")
        return refused(f"the body is not valid JSON: {reason}", code="invalid_json")
    if not path and kind in _NOT_AN_OBJECT:
        return refused("the body must be a JSON object, sent as application/json", code="invalid_json")
    if kind == "extra_forbidden":
        return refused(f"unknown field: {param}", param=param, code="unknown_field")
    message = f"{param}: {first['msg']}" if path else str(first["msg"])
    return refused(message, param=param or None, code=kind)


def param_of(path: Sequence[object]) -> str:
    """The field as OpenAI writes it: `messages[0].role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
