"""Token versions: which tokens of a choice came from which weights, as fields of a choice or a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liveweight.engine.serving.requests import Token
from liveweight.engine.serving.step_stream import parts_of


class Attribution:
    """Follows one choice. Indices count from the choice's first token, also in chunks."""

    def __init__(self) -> None:
        self._count = 0

    def fields(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """`weight_version` of the last of these tokens, None without any; `weight_spans` too if they differ."""
        spans: list[tuple[int, str]] = []
        for index, token in enumerate(tokens, start=self._count):
            if not spans or spans[-1][1] != token.weights:
                spans.append((index, token.weights))
        self._count += len(tokens)
        fields: dict[str, Any] = {"weight_version": weights_form(spans[-1][1]) if spans else None}
        if len(spans) > 1:
            fields["weight_spans"] = [
                {"from": index, "weight_version": weights_form(weights)} for index, weights in spans
            ]
        return fields


def weights_form(weights: str) -> dict[str, str | int | None]:
    """The name of weights in a step as fields."""
    label, number, digest = parts_of(weights)
    return {"label": label, "digest": digest, "number": number}
