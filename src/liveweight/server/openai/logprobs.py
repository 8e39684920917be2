"""Logprobs in the two forms that OpenAI has: lists side by side for completions, a list of objects for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liveweight.engine.serving.requests import Token
from liveweight.engine.text import TextStream, Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class CompletionLogprobs:
    """Follows one choice: `text_offset` is where a token's first character stands, or will stand, in the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._offset = 0

    def form(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """These tokens, the next ones of the choice. The chosen one is always among the alternatives."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token.id)[0])
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: Token) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for id_, logprob in (*token.top, (token.id, token.logprob)):
            found.setdefault(self._name(id_), _finite(logprob))
        return found

    def _name(self, id_: int) -> str:
        """The token's text; a part of a character as `bytes:\\xe2\\x82`, so that different tokens have different names."""
        raw = self._tokenizer.bytes_of(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """Every token by itself, with its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def form(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """These tokens with their alternatives, the likeliest first."""
        content = [
            {
                **self._entry(token.id, token.logprob),
                "top_logprobs": [self._entry(id_, logprob) for id_, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, id_: int, logprob: float | None) -> dict[str, Any]:
        raw = self._tokenizer.bytes_of(id_)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
