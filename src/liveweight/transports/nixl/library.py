"""NIXL as we call it: a dozen calls of its bindings, with our errors.

Owns an agent: its registrations, connections and requests end with it. The bindings are used directly because the Python class above them
lets its progress thread spin, which costs a core, and logs to the standard output.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from liveweight.errors import ChannelClosed, LiveWeightError, MissingExtra, Unavailable

BACKEND = "UCX"
PROGRESS_WAKE_US = 100_000
"""How long the progress thread sleeps when nothing arrives; what arrives wakes it."""

Runs = npt.NDArray[np.uint64]
"""Runs of bytes: one row (address, size, device) each."""

Request = NewType("Request", int)
List = NewType("List", int)


def load() -> Any:
    """NIXL's bindings; MissingExtra, with the pip line, where they are not installed."""
    try:
        return importlib.import_module("nixl")._bindings
    except ImportError as error:
        raise MissingExtra("transfer over NIXL (gdr, rdma)", "nixl") from error


def probe() -> tuple[list[str], list[str]]:
    """Start an agent and end it: the plugins that NIXL has, and the kinds of memory that its backend reads here."""
    agent = NixlAgent("liveweight-probe", progress=False)
    try:
        return agent.abilities()
    finally:
        agent.close()


class NixlAgent:
    """One NIXL agent with the UCX backend. Its methods may be called by any thread, and release the GIL where they may wait.

    `progress` gives it a thread of its own, which a source needs to answer readers where the network does not do that by itself. A
    reader makes progress when it asks how far a request is, so an idle one costs nothing.
    """

    def __init__(self, name: str, *, progress: bool) -> None:
        self._bindings = bindings = load()
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = progress, False
        config.pthrDelay, config.captureTelemetry = PROGRESS_WAKE_US, False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        self.name = name
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            self._backend = self._agent.createBackend(BACKEND, {})
        except Exception as error:
            raise Unavailable(f"NIXL cannot start its {BACKEND} backend: {error}") from error

    def register(self, runs: Runs) -> Any:
        """Let this memory be read, or land reads; what is returned names it. The memory must outlive it."""
        memory = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, runs)
        try:
            self._agent.registerMem(memory, [self._backend])
        except Exception as error:
            size = int(runs[:, 1].sum())
            raise Unavailable(f"NIXL cannot register {size} bytes of memory: {error}") from error
        return memory

    def deregister(self, memory: Any) -> None:
        """Undo `register`."""
        with suppress(Exception):  # foreign, and of no consequence: the agent's end does the same
            self._agent.deregisterMem(memory, [self._backend])

    def describe(self, memory: Any) -> bytes:
        """What a peer must know to reach this agent and read this memory."""
        described: bytes = self._agent.getLocalPartialMD(memory, True, [self._backend])
        return described

    def add_peer(self, description: bytes) -> str:
        """Load a peer's description. Returns the peer's name."""
        try:
            name: bytes = self._agent.loadRemoteMD(description)
        except Exception as error:
            raise ChannelClosed(f"NIXL cannot reach the source from here: {error}") from error
        return name.decode()

    def prepare(self, runs: Runs, peer: str | None = None) -> List:
        """A list of runs of registered memory, a peer's or our own, of which requests name the numbers."""
        places = self._bindings.nixlXferDList(self._bindings.DRAM_SEG, runs)
        whose = self._bindings.NIXL_INIT_AGENT if peer is None else peer
        try:
            return List(self._agent.prepXferDlist(whose, places, [self._backend]))
        except Exception as error:
            raise Unavailable(f"NIXL does not take a list of {len(runs)} places: {error}") from error

    def request(self, ours: List, theirs: List, first: int, last: int) -> Request:
        """A read of runs [first, last) of both lists. It may be posted again once it is done."""
        numbers = np.arange(first, last, dtype=np.int32)
        op = self._bindings.NIXL_READ
        made = self._agent.makeXferReq(op, ours, numbers, theirs, numbers, b"", [self._backend], True)
        return Request(made)

    def post(self, request: Request) -> bool:
        """Begin it; True if it is done already. ChannelClosed where the peer cannot be reached."""
        try:
            return bool(self._agent.postXferReq(request, b"") == self._bindings.NIXL_SUCCESS)
        except Exception as error:
            raise _failed(error) from error

    def done(self, request: Request) -> bool:
        """Whether all its bytes are there. ChannelClosed where it has failed."""
        try:
            return bool(self._agent.getXferStatus(request) == self._bindings.NIXL_SUCCESS)
        except Exception as error:
            raise _failed(error) from error

    def release(self, requests: Sequence[Request], lists: Sequence[List]) -> None:
        """Release requests that are over, and lists."""
        for request in requests:
            with suppress(Exception):
                self._agent.releaseXferReq(request)
        for prepared in lists:
            with suppress(Exception):
                self._agent.releasedDlistH(prepared)

    def abilities(self) -> tuple[list[str], list[str]]:
        """The plugins that NIXL has, and the kinds of memory that the backend reads."""
        _, kinds = self._agent.getBackendParams(self._backend)
        return sorted(self._agent.getAvailPlugins()), sorted(kind.removesuffix("_SEG") for kind in kinds)

    def close(self) -> None:
        """End it, and with it every read in flight: after this nothing lands any more."""
        self._agent = None


def _failed(error: Exception) -> LiveWeightError:
    return ChannelClosed(f"the source, or the network to it, is gone: {error}")
