"""The registration process: a process of the source's host that lets readers of other processes reach its arenas.

Owns a NIXL agent and read-only mappings of the arenas. It is a process of its own because UCX ends the process that answers a reader over
TCP when that reader dies at the wrong moment: the trainer goes on then, and a new registration process takes its place. It lives as
long as the pipe to the publisher's process does.

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
from liveweight.spec.decoding import msgpack_decoder
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
    """Let nobody reach that memory any more. -> ArenaRegistered, with nothing in it."""

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
    """What the process does: answer one order after the other, until the publisher's process is gone."""
    # A terminal sends it to every process; the end of the pipe is what ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as end:
        keeping: _Keeping | None = None
        while True:
            order, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 1)
            if not order:  # at once: nothing here needs an end, and UCX takes its time for one
                signal.raise_signal(signal.SIGKILL)
            try:
                keeping = keeping or _Keeping(name)
                answer: Answer = keeping.obey(_ORDERS.decode(order), descriptors)
            except LiveWeightError as error:
                answer = ArenaNotRegistered(fault_of(error, step="attach"))
            finally:
                for inherited in descriptors:
                    os.close(inherited)
            end.send(msgspec.msgpack.encode(answer))


class _Keeping:
    """What is kept: by address, its size and its registration."""

    def __init__(self, name: str) -> None:
        self._agent = NixlAgent(name, progress=True)
        self._kept: dict[int, tuple[int, Any]] = {}

    def obey(self, order: RegisterArena | UnregisterArena, descriptors: list[int]) -> ArenaRegistered:
        match order:
            case RegisterArena(size_bytes=size):
                if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != size:
                    raise MessageInvalid(f"an order to keep {size} bytes came with other memory")
                return self._keep(size, descriptors[0])
            case UnregisterArena(address=address):
                self._drop(address)
                return ArenaRegistered()

    def _keep(self, size: int, descriptor: int) -> ArenaRegistered:
        address = _mapped(None, size, mmap.MAP_SHARED, descriptor)
        memory = self._agent.register(np.array([[address, size, 0]], dtype=np.uint64))
        self._kept[address] = (size, memory)
        return ArenaRegistered(address=address, description=self._agent.describe(memory))

    def _drop(self, address: int) -> None:
        size, memory = self._kept.pop(address, (0, None))
        if memory is not None:
            self._agent.deregister(memory)
            _mapped(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)


def _mapped(address: int | None, size: int, flags: int, descriptor: int) -> int:
    found = _map(address, size, mmap.PROT_READ, flags, descriptor, 0)
    if found is None or found == _FAILED:
        raise Unavailable(f"mapping {size} bytes for readers: {os.strerror(ctypes.get_errno())}")
    return int(found)


def answer_of(frame: bytes) -> Answer:
    """What the registration process said; ChannelClosed for nothing at all."""
    if not frame:
        raise ChannelClosed("the process that keeps memory for readers is gone")
    return _ANSWERS.decode(frame)
