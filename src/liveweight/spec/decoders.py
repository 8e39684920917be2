"""Decoders, made one at a time.

msgspec prepares a struct type when it is first decoded. A second thread that uses the half-prepared type reads through a null pointer,
and the process is gone; so nothing else in this package makes a decoder.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")

_making = threading.Lock()


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of JSON to that type. Threads may share it."""
    with _making:
        return msgspec.json.Decoder(kind)


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of msgpack to that type. Threads may share it."""
    with _making:
        return msgspec.msgpack.Decoder(kind)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """What `msgspec.json.decode` gives, and raises."""
    decoded: _T = json_decoder(kind).decode(data)
    return decoded


def from_msgpack(data: bytes | memoryview, kind: type[_T]) -> _T:
    """What `msgspec.msgpack.decode` gives, and raises."""
    decoded: _T = msgpack_decoder(kind).decode(data)
    return decoded


def converted(value: object, kind: type[_T], *, strict: bool = True) -> _T:
    """What `msgspec.convert` gives, and raises."""
    with _making:
        return msgspec.convert(value, kind, strict=strict)
