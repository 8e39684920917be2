"""Open requests: from the id in an HTTP answer to the engine's request numbers. For the event loop's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from liveweight.server.engine_bridge import EngineBridge


class OpenRequests:
    """Knows a request for as long as it is open, so it never grows beyond what the engine takes."""

    def __init__(self) -> None:
        self._open: dict[str, EngineBridge] = {}

    @contextmanager
    def register(self, id_: str, bridge: EngineBridge) -> Iterator[None]:
        """Known by this id until the block ends."""
        self._open[id_] = bridge
        try:
            yield
        finally:
            del self._open[id_]

    def tokens(self) -> dict[str, int]:
        """Every open request, with the tokens that it has so far. One whose last token is on its way to the client has ended."""
        return {id_: bridge.tokens for id_, bridge in self._open.items() if bridge.requests}

    def find(self, ids: Sequence[str]) -> tuple[list[int], list[str]]:
        """The engine's numbers of these, each once, and the ids that no open request has."""
        known = {id_: self._open[id_] for id_ in ids if id_ in self._open}
        numbers = [number for bridge in known.values() for number in bridge.requests]
        return numbers, [id_ for id_ in dict.fromkeys(ids) if id_ not in known]
