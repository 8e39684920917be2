"""The registration process: a process of the source's host that lets readers of other processes reach its arenas.

Owns a NIXL agent and read-only mappings of the arenas. It is a process of its own because UCX ends the process that answers a reader over
TCP when that reader dies at the wrong moment: the trainer goes on then, and a new registration process takes its place. It ends
when the socket to the publisher's process closes.

What is withdrawn stays reserved in the address space, as a page of zeros over and over: a late reader finds the generation of a closed
arena there, and no other arena ever comes to lie where a reader still believes the old one to be.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
from typing import Any

import msgspec
import numpy as np

from liveweight.errors import ChannelClosed, LiveWeightError, MessageInvalid, Unavailable
from liveweight.spec.decoders import msgpack_decoder
from liveweight.transports.nixl.library import NixlAgent
from liveweight.wire.messages.values import Fault, fault_of

MESSAGE_BYTES = 1 << 20
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_map.restype = ctypes.c_void_p


class RegisterArena(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Let readers reach the memory whose descriptor comes along. -> ArenaRegistered."""

    size_bytes: int


class UnregisterArena(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """End the registration of that memory. -> ArenaRegistered, with nothing in it."""

    address: int


class ArenaRegistered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Where the memory lies in the registration process, and what NIXL says of it to readers."""

    address: int = 0
    description: bytes = b""


class ArenaNotRegistered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Why it cannot be reached."""

    fault: Fault


Answer = ArenaRegistered | ArenaNotRegistered
_ORDERS: msgspec.msgpack.Decoder[RegisterArena | UnregisterArena] = msgpack_decoder(
    RegisterArena | UnregisterArena
)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgpack_decoder(ArenaRegistered | ArenaNotRegistered)


def main(descriptor: int, name: str) -> None:
    """The process: answers one order after the other, until the publisher's process is gone."""
    # A terminal sends SIGINT to every process; this one ends when the socket closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as end:
        registrations: _Registrations | None = None
        while True:
            order, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 1)
            if not order:  # exit at once: nothing here needs closing, and UCX takes long to close
                signal.raise_signal(signal.SIGKILL)
            try:
                registrations = registrations or _Registrations(name)
                answer: Answer = registrations.handle(_ORDERS.decode(order), descriptors)
            except LiveWeightError as error:
                answer = ArenaNotRegistered(fault_of(error, step="attach"))
            finally:
                for inherited in descriptors:
                    os.close(inherited)
            end.send(msgspec.msgpack.encode(answer))


class _Registrations:
    """The registered arenas: by address, the size and NIXL's registration."""

    def __init__(self, name: str) -> None:
        self._agent = NixlAgent(name, progress=True)
        self._registered: dict[int, tuple[int, Any]] = {}

    def handle(self, order: RegisterArena | UnregisterArena, descriptors: list[int]) -> ArenaRegistered:
        match order:
            case RegisterArena(size_bytes=size):
                if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != size:
                    raise MessageInvalid(f"an order to register {size} bytes came with other memory")
                return self._register(size, descriptors[0])
            case UnregisterArena(address=address):
                self._unregister(address)
                return ArenaRegistered()

    def _register(self, size: int, descriptor: int) -> ArenaRegistered:
        address = _mapped(None, size, mmap.MAP_SHARED, descriptor)
        memory = self._agent.register(np.array([[address, size, 0]], dtype=np.uint64))
        self._registered[address] = (size, memory)
        return ArenaRegistered(address=address, description=self._agent.describe(memory))

    def _unregister(self, address: int) -> None:
        size, memory = self._registered.pop(address, (0, None))
        if memory is not None:
            self._agent.deregister(memory)
            _mapped(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)


def _mapped(address: int | None, size: int, flags: int, descriptor: int) -> int:
    found = _map(address, size, mmap.PROT_READ, flags, descriptor, 0)
    if found is None or found == _FAILED:
        raise Unavailable(f"mapping {size} bytes for readers: {os.strerror(ctypes.get_errno())}")
    return int(found)


def answer_of(frame: bytes) -> Answer:
    """Decode the registration process's answer. Raises ChannelClosed for an empty frame."""
    if not frame:
        raise ChannelClosed("the registration process is gone")
    return _ANSWERS.decode(frame)
