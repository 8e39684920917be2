"""The control route: how it refuses bodies, its timeout, and the errors in its schema."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import Response

from liveweight.server.errors import BadControl
from liveweight.server.response_types import Error, VersionAnswer
from liveweight.server.validation_errors import refusal
from liveweight.spec.manifest import Version

TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 3600.0
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
ErrorResponses: TypeAlias = dict[int | str, dict[str, Any]]
ANY: ErrorResponses = {"default": {"model": Error, "description": "Any other error."}}
INVALID: ErrorResponses = {422: {"model": Error, "description": "The request is wrong; `param` says where."}}
CONFLICT: ErrorResponses = {409: {"model": Error, "description": "Not in this state; nothing was changed."}}
LATE: ErrorResponses = {
    504: {"model": Error, "description": "It was not done in time; what was begun goes on."}
}


def error_responses(*kinds: ErrorResponses) -> ErrorResponses:
    """The errors in a route's schema."""
    return {status: row for kind in (*kinds, ANY) for status, row in kind.items()}


class ControlRoute(APIRoute):
    """A route that refuses bodies with 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI makes, with that one difference."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise refusal(error, BadControl) from error

        return handler


def version_answer(version: Version) -> VersionAnswer:
    """A version as answers have it."""
    return {
        "run": version.run,
        "label": version.label,
        "digest": version.digest,
        "number": version.number,
    }
