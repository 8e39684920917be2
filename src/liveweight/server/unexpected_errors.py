"""Unexpected errors: logged with their traceback, answered as a 500 without details."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from liveweight.server.errors import error_response

_LOGGER = logging.getLogger("liveweight")


class Unexpected:
    """Middleware around everything: the connection goes on, unless an answer was cut off in its middle."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if began or scope["type"] != "http":
                raise
            _LOGGER.exception("%s %s failed", scope["method"], scope["path"])
            await error_response(error)(scope, receive, send)
