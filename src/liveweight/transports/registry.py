"""The registry of transfer modes: one table, from which config, CLI, HTTP, docs and tests derive.

Owns what a mode is called, how far it reaches and which offers it has. How it works is its module's, imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from liveweight.errors import Refused
from liveweight.observe.events import OfferKind

if TYPE_CHECKING:
    from liveweight.devices.device import Device
    from liveweight.devices.kernels import Kernels
    from liveweight.transports.port import Outlet, Reader
    from liveweight.wire.credentials import Secret

Reach: TypeAlias = Literal["one host", "any host", "files"]


class MakeOutlet(Protocol):
    """Makes the source half, with sockets in that directory and arenas on that device (None: the host)."""

    def __call__(self, directory: Path, secret: Secret, device: Device | None = None) -> Outlet: ...


class MakeReader(Protocol):
    """Makes the rank half, for shadows on that device (None: the host), which these kernels write."""

    def __call__(self, secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One transfer mode. `extra` is what pip must install for it; `outlet` and `reader` make its two halves."""

    name: str
    reach: Reach
    offers: tuple[OfferKind, ...]
    summary: str
    extra: str | None
    outlet: MakeOutlet
    reader: MakeReader


def mode(name: str) -> Mode:
    """The mode of that name; refused, with the names there are, for any other."""
    found = TRANSPORTS.get(name)
    if found is None:
        raise Refused(f"unknown transfer mode {name!r}, known: {', '.join(sorted(TRANSPORTS))}")
    return found


def _ipc_outlet(directory: Path, secret: Secret, device: Device | None = None) -> Outlet:
    from liveweight.transports.ipc.source import IpcOutlet

    return IpcOutlet(directory, secret, device=device)


def _ipc_reader(secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader:
    from liveweight.transports.ipc.reader import IpcReader

    return IpcReader(secret, kernels, device=device)


_MODES = (
    Mode(
        name="ipc",
        reach="one host",
        offers=("frozen", "live"),
        summary="shared memory that ranks map read-only; on CUDA devices, IPC handles",
        extra=None,
        outlet=_ipc_outlet,
        reader=_ipc_reader,
    ),
)

TRANSPORTS: Mapping[str, Mode] = MappingProxyType({entry.name: entry for entry in _MODES})
"""Every transfer mode, by name."""
