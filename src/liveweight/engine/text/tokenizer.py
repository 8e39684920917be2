"""The tokenizer of a model directory: text to ids and back, as transformers does it on the same directory.

Owns what a single token stands for. Text that grows is text/stream's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from liveweight.engine.text.chat import ChatTemplate
from liveweight.engine.text.files import first_line, read_text
from liveweight.errors import CheckpointInvalid, MissingExtra, RequestInvalid
from liveweight.spec.decoders import from_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner


class _Decoder(msgspec.Struct):
    type: str = ""
    decoders: list[_Decoder] = msgspec.field(default_factory=list)

    def kinds(self) -> list[str]:
        inner = [kind for decoder in self.decoders for kind in decoder.kinds()]
        return inner if self.type == "Sequence" else [self.type]


class _File(msgspec.Struct):
    decoder: _Decoder | None = None


class Tokenizer:
    """Text to ids and back. Thread-safe: nothing of it changes after loading."""

    def __init__(
        self, inner: Inner, *, decoders: Sequence[str] = (), chat: ChatTemplate | None = None
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.chat = inner, chat
        self.byte_level = list(decoders) == ["ByteLevel"]
        self._added = {id_: str(token.content) for id_, token in inner.get_added_tokens_decoder().items()}
        self._special = frozenset(
            id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._bytes = _fallback_bytes(inner) if "ByteFallback" in decoders else {}
        self._byte_of = _byte_alphabet()

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The tokenizer and the chat template of a model directory. CheckpointInvalid if a file is missing or broken."""
        try:
            from tokenizers import Tokenizer as Inner
        except ModuleNotFoundError as error:
            raise MissingExtra("a tokenizer", "engine") from error
        path = directory / "tokenizer.json"
        text = read_text(path)
        try:
            inner = Inner.from_str(text)
            decoder = from_json(text, _File).decoder
        except Exception as error:  # the library raises no class of its own
            raise CheckpointInvalid(f"{path}: {first_line(error)}") from error
        kinds = [] if decoder is None else decoder.kinds()
        return cls(inner, decoders=kinds, chat=ChatTemplate.load(directory))

    @property
    def size(self) -> int:
        """How many ids it knows. A model's vocabulary may be padded beyond it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text. Special tokens that are written in it are parsed; `special` also adds those that begin or end a text."""
        return list(self._inner.encode(text, add_special_tokens=special).ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a conversation that the model is to answer. RequestInvalid if the model has no template, or it refuses."""
        if self.chat is None:
            raise RequestInvalid("the model has no chat template; use /v1/completions")
        return self.encode(self.chat.render(messages, variables), special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens. Ids that it does not know have none; broken UTF-8 becomes U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def silent(self, token: int) -> bool:
        """Whether the token has no text in `decode`: a special one, or an id that is not known."""
        return token in self._special or self._inner.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one byte of a character that the vocabulary does not have."""
        return token in self._bytes

    def bytes_of(self, token: int) -> bytes:
        """What the token stands for, special tokens by their name; a token may be a part of a character."""
        piece = self._inner.id_to_token(token)
        if piece is None:
            return b""
        if token in self._special:
            return self._added[token].encode()
        if token in self._bytes:
            return self._bytes[token]
        if self.byte_level:
            return self._bytes_in(piece)
        return piece.replace("\u2581", " ").encode()

    def _bytes_in(self, piece: str) -> bytes:
        try:
            return bytes(self._byte_of[character] for character in piece)
        except KeyError:
            return piece.encode()  # an added token, which is kept as it is written


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with: printable ones as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _fallback_bytes(inner: Inner) -> dict[int, bytes]:
    """The tokens `<0x00>` to `<0xFF>`, as far as the vocabulary has them."""
    found = {inner.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(0x100)}
    return {token: byte for token, byte in found.items() if token is not None}
