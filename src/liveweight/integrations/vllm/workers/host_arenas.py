"""Host memory that the ranks of one host share: two arenas, each with room for all tensors of a version.

Owns the memory files, their mappings, and the socket at which the host's first rank hands them to the others. Each rank writes its own
share, and installs from the whole arena. Pages are allocated when a share is first written, and freed with the last process that maps them.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from liveweight.devices.cpu import address_of, check_available, mapped, out_of_memory, populate
from liveweight.devices.memory import Memory
from liveweight.errors import ChannelClosed, MessageInvalid, WrongState
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import Secret
from liveweight.wire.descriptor_server import DescriptorServer
from liveweight.wire.descriptors import close_all, fetch

COUNT = 2
"""One arena holds the installed version; the other is staged into, or holds the version before, for undo."""
_TOKEN = b"arenas"
_PAUSE_MS = 10


class HostArenas:
    """The arenas as one rank maps them. Created and closed by the rank's main thread."""

    def __init__(
        self, path: Path, secret: Secret, *, size_bytes: int, first: bool, deadline: Deadline
    ) -> None:
        """`first`: this rank creates the arenas and hands them out at the socket `path`; the other ranks fetch them there."""
        self.size_bytes = size_bytes
        with ExitStack() as stack:
            descriptors = _made(size_bytes) if first else _fetched(path, secret, size_bytes, deadline)
            stack.callback(close_all, descriptors)
            self._mappings = [mmap.mmap(descriptor, size_bytes) for descriptor in descriptors]
            self._server = None
            if first:
                self._server = DescriptorServer(path, secret)
                self._server.register(_TOKEN, descriptors)

    def memory(self, number: int) -> Memory:
        """The whole memory of one arena."""
        return mapped(self._mappings[number], 0, self.size_bytes, writable=True)

    def fill(self, number: int, first_byte: int, last_byte: int) -> None:
        """Fault a rank's share in, so that staging does not wait for pages. Raises OutOfMemory if they cannot be allocated."""
        size = last_byte - first_byte
        start = address_of(self._mappings[number]) + first_byte // mmap.PAGESIZE * mmap.PAGESIZE
        end = address_of(self._mappings[number]) + last_byte
        check_available("a host's arena", size)
        try:
            populate(start, end - start, writable=True)
        except OSError as error:
            raise out_of_memory("a host's arena", size, error) from error

    def close(self) -> None:
        """Stop handing arenas out. A mapping ends with the last of its views."""
        if self._server is not None:
            self._server.close()
        self._mappings = []


def _made(size_bytes: int) -> list[int]:
    descriptors: list[int] = []
    try:
        for _ in range(COUNT):
            descriptors.append(os.memfd_create("liveweight-vllm", os.MFD_CLOEXEC))
            os.ftruncate(descriptors[-1], size_bytes)
    except OSError as error:
        close_all(descriptors)
        raise out_of_memory("a host's arenas", COUNT * size_bytes, error) from error
    return descriptors


def _fetched(path: Path, secret: Secret, size_bytes: int, deadline: Deadline) -> list[int]:
    while True:
        try:
            found = fetch(path, secret, _TOKEN, deadline)
        except (ChannelClosed, WrongState):  # the first rank does not listen yet, or has only just begun to
            deadline.check(f"the first rank of this host to share its memory at {path}")
            select.poll().poll(_PAUSE_MS)
            continue
        _check(found, size_bytes)
        return found


def _check(descriptors: Sequence[int], size_bytes: int) -> None:
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    if sizes != [size_bytes] * COUNT:
        close_all(list(descriptors))
        raise MessageInvalid(
            f"the host's arenas have {sizes} bytes, this rank expects {COUNT} of {size_bytes}"
        )
