"""Which tokens of a choice came from which weights, as a choice or a chunk says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liveweight.engine.requests import Token


class Attribution:
    """Follows one choice. Indices count from the choice's first token, also in chunks."""

    def __init__(self) -> None:
        self._count = 0

    def fields(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`weight_version` of the last of these tokens, None without any; `weight_spans` too if they differ."""
        spans: list[dict[str, Any]] = []
        for index, token in enumerate(tokens, start=self._count):
            if not spans or spans[-1]["weights"] != token.weights:
                spans.append({"from": index, "weights": token.weights})
        self._count += len(tokens)
        fields: dict[str, Any] = {"weight_version": spans[-1]["weights"] if spans else None}
        return fields | {"weight_spans": spans} if len(spans) > 1 else fields
