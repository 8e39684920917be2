"""Errors over HTTP: one table from class to status and type, one shape for all of them.

Owns `{"error": {"message", "type", "param", "code"}}`. The message is the exception's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response

from liveweight.errors import (
    Damage,
    DeadlineExceeded,
    EngineStopping,
    LiveWeightError,
    OfferChanged,
    OutcomeUnknown,
    QueueFull,
    RankLost,
    Refused,
    RequestInvalid,
    RoundAborted,
    RoundFailed,
    Torn,
    VersionNotOffered,
    VersionNotServed,
    WeightsPending,
    WireError,
)

RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that HTTP itself refuses. `param` is the field that is wrong, `code` a word that programs can compare."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = self.code if code is None else code


class BadRequest(ApiError):
    """A body that is not what the route takes."""


class BadControl(ApiError):
    """A body that is not what a control route takes."""


class WrongKey(ApiError):
    """No key, or another one."""

    code = "invalid_api_key"


class UnknownModel(ApiError):
    """A model that is not served here."""

    code = "model_not_found"


class BodyTooLarge(ApiError):
    """A body beyond the limit."""

    code = "body_too_large"


class BodyTooSlow(ApiError):
    """A body that did not arrive in time."""

    code = "body_too_slow"


@dataclass(frozen=True, slots=True)
class Kind:
    """Status and type of a class of errors."""

    status: int
    type: str


INTERNAL = Kind(500, "server_error")
TABLE: Mapping[type[Exception], Kind] = {
    BadRequest: Kind(400, "invalid_request_error"),
    RequestInvalid: Kind(400, "invalid_request_error"),
    WrongKey: Kind(401, "authentication_error"),
    UnknownModel: Kind(404, "not_found_error"),
    BodyTooSlow: Kind(408, "invalid_request_error"),
    Refused: Kind(409, "conflict_error"),
    BodyTooLarge: Kind(413, "invalid_request_error"),
    BadControl: Kind(422, "invalid_request_error"),
    QueueFull: Kind(429, "rate_limit_error"),
    Damage: Kind(502, "bad_gateway_error"),
    OfferChanged: Kind(503, "service_unavailable_error"),
    EngineStopping: Kind(503, "service_unavailable_error"),
    Torn: Kind(503, "service_unavailable_error"),
    WeightsPending: Kind(503, "service_unavailable_error"),
    RankLost: Kind(503, "service_unavailable_error"),
    RoundAborted: Kind(503, "service_unavailable_error"),
    WireError: Kind(503, "service_unavailable_error"),
    DeadlineExceeded: Kind(504, "timeout_error"),
    OutcomeUnknown: Kind(504, "timeout_error"),
    LiveWeightError: INTERNAL,
}
"""Every class that a route may raise; the nearest ancestor counts. Any other class is a 500 without details."""

_OF_STATUS = {404: "not_found_error", 405: "invalid_request_error"}


def kind_of(error: BaseException) -> Kind:
    """The row of the nearest ancestor; of a round that failed, that of its cause."""
    if isinstance(error, RoundFailed):
        return kind_of(error.cause)
    return next((TABLE[cls] for cls in type(error).__mro__ if cls in TABLE), INTERNAL)


def error_body(error: BaseException, *, param: str | None = None) -> Mapping[str, Mapping[str, object]]:
    """The error in OpenAI's shape. Errors of other classes get a text without details."""
    kind = kind_of(error)
    match error:
        case ApiError():
            return _shape(str(error), kind.type, error.param or param, error.code)
        case RoundFailed(cause=cause):
            text = str(error).removeprefix(f"{error.code} ").removesuffix(".")
            return _shape(f"{text}; {cause.remedy}", kind.type, param, error.code)
        case VersionNotOffered(offered=offered):
            body = _shape(f"{error}; {error.remedy}", kind.type, param or "version", error.code)
            return {"error": {**body["error"], "offered": list(offered)}}
        case VersionNotServed(demanded=demanded, serving=serving):
            body = _shape(f"{error}; {error.remedy}", kind.type, param or "weight_version", error.code)
            return {"error": {**body["error"], "demanded": dict(demanded), "serving": serving}}
        case LiveWeightError():
            return _shape(f"{error}; {error.remedy}", kind.type, param, error.code)
        case _:
            return _shape("internal error; the server's log has it", kind.type, None, "internal_error")


def error_response(error: BaseException, *, param: str | None = None) -> Response:
    """The answer to a request that failed with it."""
    kind = kind_of(error)
    headers = {}
    if kind.status in (429, 503) or isinstance(error, VersionNotServed):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if kind.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return _json(error_body(error, param=param), kind.status, headers)


def http_response(error: HTTPException, route: str) -> Response:
    """The answer where the framework itself refused: no such route, no such method, a body that cannot be parsed."""
    message = f"{route}: {error.detail}"
    kind = _OF_STATUS.get(error.status_code, "invalid_request_error")
    return _json(_shape(message, kind, None, None), error.status_code, dict(error.headers or {}))


def _shape(message: str, kind: str, param: str | None, code: str | None) -> dict[str, dict[str, object]]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(body: Mapping[str, object], status: int, headers: Mapping[str, str]) -> Response:
    text = json.dumps(body)  # ASCII: whatever text of a request the message quotes
    return Response(text, status, dict(headers), media_type="application/json")
