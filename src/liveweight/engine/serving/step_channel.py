"""The step channel: one end of the stream between the engine and a rank, framed messages over a socket pair.

The pair has no address: the rank's process inherits its end, and the kernel closes it when either process dies. No other process can
send on it, so it needs no secret. The size limit guards against bugs, not against attackers.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from liveweight.errors import ChannelClosed, DeadlineExceeded, MessageInvalid, WireError
from liveweight.spec.decoders import msgpack_decoder

LIMIT_BYTES = 1 << 28
_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 18

Received = TypeVar("Received")
Kind = TypeVar("Kind")


class StepChannel(Generic[Received]):
    """Sends any message, receives those of one closed union. For one thread."""

    def __init__(self, end: socket.socket, receives: object, *, peer: str) -> None:
        self.peer = peer
        self._socket = end
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[Received] = msgpack_decoder(receives)
        self._kept = bytearray()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Hand a message over. Waits only while the peer has a socket's buffer full unread, and not longer than the socket's timeout."""
        body = self._encode(message)
        if len(body) > LIMIT_BYTES:
            raise MessageInvalid(f"a message of {len(body)} bytes to {self.peer}")
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.peer} to read its stream", self._socket.gettimeout() or 0.0
            ) from error
        except OSError as error:
            raise ChannelClosed(f"{self.peer} is gone: {error}") from error

    def receive(self) -> Received:
        """The next message; waits for it. ChannelClosed when the peer has closed."""
        while (message := self._next()) is None:
            self._read()
        return message

    def arrived(self) -> list[Received]:
        """After the socket became readable: the messages that are complete now."""
        self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def last_message(self, kind: type[Kind]) -> Kind | None:
        """The last unread message of that kind from a peer that is gone; else None."""
        self._socket.settimeout(0)
        found = None
        try:
            while True:
                found = next((message for message in self.arrived() if isinstance(message, kind)), found)
        except WireError:
            return found

    def interrupt(self) -> None:
        """Make `receive` raise ChannelClosed once all arrived messages are read; `send` still works. Any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """End the stream."""
        self._socket.close()

    def _read(self) -> None:
        try:
            more = self._socket.recv(_CHUNK_BYTES)
        except OSError as error:
            raise ChannelClosed(f"{self.peer} is gone: {error}") from error
        if not more:
            raise ChannelClosed(f"{self.peer} has closed its stream")
        self._kept += more

    def _next(self) -> Received | None:
        if len(self._kept) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._kept)
        if length > LIMIT_BYTES:
            raise MessageInvalid(f"{self.peer} announces a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._kept) < end:
            return None
        body = bytes(self._kept[_LENGTH.size : end])
        del self._kept[:end]
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise MessageInvalid(f"{self.peer} sends what is no message of ours: {error}") from error
