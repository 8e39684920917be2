"""Frames: a header that names the protocol, and one message of a closed set in msgpack.

Owns the bytes of a frame. Any bytes whatever decode to a message or raise a WireError.
Which messages there are is wire/messages's; sending them is the channels'.

    b"LW" | u16 version, little-endian | msgpack [call, {"type": tag, ...}]
    b"LW" | u16 version                                                     the greeting: a header alone
    b"LW" | u16 0                      | msgpack {"ours": int, "theirs": int}

Version 0 is the refusal, for ever: the one frame that peers of any version understand. It names the version of the
one who refuses (`ours`) and the version that it refused (`theirs`).
"""

from __future__ import annotations

import struct
from typing import Annotated, Generic, TypeVar

import msgspec

from liveweight.errors import MessageInvalid, MessageTooLarge, ProtocolMismatch
from liveweight.spec.decoders import msgpack_decoder
from liveweight.wire.limits import WireLimits

PROTOCOL = 8
"""The version that this release speaks."""

REFUSAL = 0
"""The version in the header of a refusal; no release ever speaks it."""

NOTIFICATION = 0
"""The call of a message that answers nothing and expects no answer."""

MAGIC = b"LW"
_HEADER = struct.Struct("<2sH")
_LAST_VERSION = 0xFFFF
_REASON_CHARACTERS = 500
"""How much of a decoder's error is kept: it may quote the frame."""

Message = TypeVar("Message")


class Envelope(msgspec.Struct, Generic[Message], frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message and the call that it belongs to; 0 for none."""

    call: Annotated[int, msgspec.Meta(ge=0)]
    body: Message


class _Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ours: Annotated[int, msgspec.Meta(ge=1, le=_LAST_VERSION)]
    theirs: Annotated[int, msgspec.Meta(ge=1, le=_LAST_VERSION)]


class _Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An envelope whose body is not looked at."""

    call: Annotated[int, msgspec.Meta(ge=0)]
    body: msgspec.Raw


_heads: msgspec.msgpack.Decoder[_Head] = msgpack_decoder(_Head)
_refusals: msgspec.msgpack.Decoder[_Refusal] = msgpack_decoder(_Refusal)


def version_of(frame: bytes) -> int:
    """The version in a frame's header. Raises MessageInvalid when there is no header of ours."""
    if len(frame) < _HEADER.size:
        raise MessageInvalid(f"{len(frame)} bytes are no frame")
    magic, version = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise MessageInvalid(f"a frame begins with {MAGIC!r}, this one with {magic!r}")
    return int(version)


class Codec(Generic[Message]):
    """Turns messages of one closed union into frames and back. Holds no state; threads may share it."""

    def __init__(self, types: object, *, protocol: int = PROTOCOL) -> None:
        """`types` is the union of tagged structs; `protocol` differs from ours only in tests of refusals."""
        if not REFUSAL < protocol <= _LAST_VERSION:
            raise ValueError(f"protocol {protocol} is not between 1 and {_LAST_VERSION}")
        self.protocol = protocol
        self.greeting = _HEADER.pack(MAGIC, protocol)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Envelope[Message]]
        self._decoder = msgpack_decoder(Envelope.__class_getitem__(types))  # type: ignore[attr-defined]

    def encode(self, body: Message, *, call: int, limits: WireLimits) -> bytes:
        """The frame of a message. Raises MessageTooLarge when no peer with these limits would take it."""
        frame = self.greeting + self._encoder.encode(Envelope(call, body))
        if len(frame) > limits.message_bytes:
            raise MessageTooLarge(len(frame), limits.message_bytes)
        return frame

    def decode(self, frame: bytes, *, limits: WireLimits) -> Envelope[Message]:
        """The message in a frame; a WireError, and nothing else, for any other bytes."""
        if len(frame) > limits.message_bytes:
            raise MessageTooLarge(len(frame), limits.message_bytes)
        version = version_of(frame)
        if version == REFUSAL:
            raise ProtocolMismatch(self.protocol, _refuser(frame))
        if version != self.protocol:
            raise ProtocolMismatch(self.protocol, version)
        try:
            return self._decoder.decode(memoryview(frame)[_HEADER.size :])
        except Exception as error:  # whatever a message's own checks, or nesting without end, may raise
            raise MessageInvalid(
                f"no message of ours: {_printable(str(error))}"[:_REASON_CHARACTERS]
            ) from error

    def call_of(self, frame: bytes, *, limits: WireLimits) -> int:
        """The call of a frame that `decode` refused, so that it can be answered: the frame is of our version and an envelope, only its body
        is no message. 0 if it expects no answer or is no envelope. Never raises."""
        if len(frame) > limits.message_bytes or not frame.startswith(self.greeting):
            return NOTIFICATION
        try:
            return _heads.decode(memoryview(frame)[_HEADER.size :]).call
        except Exception:  # as in `decode`
            return NOTIFICATION

    def refusal(self, theirs: int) -> bytes:
        """The frame that tells a peer of version `theirs` that we do not speak it."""
        body = self._encoder.encode(_Refusal(ours=self.protocol, theirs=theirs))
        return _HEADER.pack(MAGIC, REFUSAL) + body


def _refuser(frame: bytes) -> int:
    try:
        return _refusals.decode(memoryview(frame)[_HEADER.size :]).ours
    except Exception as error:
        raise MessageInvalid(f"no refusal of ours: {error}") from error


def _printable(text: str) -> str:
    """The text in one line: it quotes bytes of a peer, and goes into logs."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_REASON_CHARACTERS])
