"""Text that grows token by token: what may be sent now, and whether a stop string was reached.

Owns what is held back: characters of which bytes are missing, and an end that may be the beginning of a stop string.
Put together, the pieces are the text that decoding all tokens at once gives, cut before the first stop string.
Values and arithmetic only: no threads, no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from liveweight.engine.text.tokenizer import Tokenizer


class _Detokenizer(Protocol):
    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    """The text of one answer. Of several stop strings the one that is complete first counts, the longest of those."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._text: _Detokenizer = _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now, and whether a stop string ended it; after that there is no more."""
        if self._stopped:
            return "", True
        return self._pass(self._text.push(token))

    def finish(self) -> str:
        """The text that was held back; nothing after a stop string."""
        if self._stopped:
            return ""
        text, _ = self._pass(self._text.finish())
        held, self._held = self._held, ""
        return text if self._stopped else text + held

    def _pass(self, more: str) -> tuple[str, bool]:
        if not self._stop or not more:
            return more, False
        text = self._held + more
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, cut = min(found)
            self._held, self._stopped = "", True
            return text[:cut], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text begin the stop string, at most."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class _Bytes:
    """For tokens that are bytes: a character is text as soon as its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that the token completes."""
        return "" if self._tokenizer.silent(token) else self._utf8.decode(self._tokenizer.bytes_of(token))

    def finish(self) -> str:
        """What an incomplete character at the end is shown as."""
        return self._utf8.decode(b"", final=True)


class _Window:
    """For all others: decodes the last tokens again, with and without the new one, since a token's text depends on its neighbours.

    A run of byte tokens is decoded as a whole, into characters or into none, so it becomes text when it ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._known = 0

    def push(self, token: int) -> str:
        """Text that the token completes."""
        if self._tokenizer.silent(token):
            return ""
        self._tokens.append(token)
        return "" if self._tokenizer.is_byte(token) else self.finish()

    def finish(self) -> str:
        """The text of the tokens since the last time."""
        before = self._tokenizer.decode(self._tokens[: self._known])
        text = self._tokenizer.decode(self._tokens)[len(before) :]
        if len(self._tokens) > self._known:
            self._tokens = self._tokens[self._known :]
            self._known = len(self._tokens)
        return text
