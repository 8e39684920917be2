"""The registry of transfer modes: one table, from which config, CLI, HTTP, docs and tests derive.

Owns what a mode is called, how far it reaches and which offers it has. The mode's package does the work; it is imported at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from liveweight.errors import MissingExtra, Refused
from liveweight.observe.events import OfferKind

if TYPE_CHECKING:
    from liveweight.devices.device import Device
    from liveweight.devices.kernels import Kernels
    from liveweight.transports.port import Reader, TransportSource
    from liveweight.wire.credentials import Secret

Reach: TypeAlias = Literal["one host", "any host", "files"]


class MakeTransportSource(Protocol):
    """Makes the source half, with sockets in that directory and arenas on that device (None: the host).

    `host` is an address of this host that ranks of other hosts reach, for modes that reach them; None: ranks are on this host.
    """

    def __call__(
        self, directory: Path, secret: Secret, device: Device | None = None, host: str | None = None
    ) -> TransportSource: ...


class MakeReader(Protocol):
    """Makes the rank half, for shadows on that device (None: the host), which these kernels write."""

    def __call__(self, secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One transfer mode. `extra` is what pip must install for it; `transport_source` and `reader` make its two halves, on these `devices`.

    Rings lie in host memory, whatever the mode.
    `sharded`: whether it has offers of shards in several trainer ranks.
    """

    name: str
    reach: Reach
    offers: tuple[OfferKind, ...]
    summary: str
    extra: str | None
    transport_source: MakeTransportSource
    reader: MakeReader
    devices: tuple[str, ...] = ("cpu", "cuda")
    sharded: bool = True

    def devices_of(self, kind: OfferKind) -> tuple[str, ...]:
        """Where offers of that kind may lie."""
        return tuple(name for name in self.devices if kind != "ring" or name == "cpu")


def mode(name: str) -> Mode:
    """The mode of that name; refused, with the names there are, for any other."""
    found = TRANSPORTS.get(name)
    if found is None:
        raise Refused(f"unknown transfer mode {name!r}, known: {', '.join(sorted(TRANSPORTS))}")
    return found


def check_installed(chosen: Mode) -> None:
    """MissingExtra, with the pip line, where a mode needs what is not installed here."""
    if chosen.extra is not None and find_spec(chosen.extra) is None:
        raise MissingExtra(f"transfer mode {chosen.name}", chosen.extra)


def check_offer(chosen: Mode, offer: OfferKind) -> None:
    """Refuse an offer that the mode does not have."""
    if offer not in chosen.offers:
        raise Refused(f"{chosen.name} has no {offer} offers, but {', '.join(chosen.offers)}")


def check_device(chosen: Mode, offer: OfferKind, device: Device) -> None:
    """Refuse a device that offers of that kind cannot lie on."""
    name = device.name.partition(":")[0]
    if offer == "ring" and name not in chosen.devices_of(offer):
        raise Refused(f"{offer} offers lie in host memory, and the publisher's device is {device.name}")


def _ipc_transport_source(
    directory: Path, secret: Secret, device: Device | None = None, host: str | None = None
) -> TransportSource:
    del host  # its ranks are on this one
    from liveweight.transports.ipc.source import IpcSource

    return IpcSource(directory, secret, device=device)


def _ipc_reader(secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader:
    from liveweight.transports.ipc.reader import IpcReader
    from liveweight.transports.sharded import ShardedReader

    return ShardedReader(partial(IpcReader, secret, kernels, device=device), secret)


def _snapshot_transport_source(
    directory: Path, secret: Secret, device: Device | None = None, host: str | None = None
) -> TransportSource:
    del host  # files have none
    from liveweight.transports.snapshot.source import SnapshotSource

    return SnapshotSource(directory, secret, device=device)


def _snapshot_reader(secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader:
    from liveweight.transports.snapshot.reader import SnapshotReader

    return SnapshotReader(secret, kernels, device=device)


def _nixl_transport_source(
    name: str, directory: Path, secret: Secret, device: Device | None = None, host: str | None = None
) -> TransportSource:
    from liveweight.transports.nixl.source import NixlSource

    return NixlSource(directory, secret, name=name, device=device, host=host)


def _nixl_reader(name: str, secret: Secret, kernels: Kernels, device: Device | None = None) -> Reader:
    from liveweight.transports.nixl.reader import NixlReader
    from liveweight.transports.sharded import ShardedReader

    make = partial(NixlReader, secret, kernels, name=name, direct=name == "gdr", device=device)
    return ShardedReader(make, secret)


_MODES = (
    Mode(
        name="ipc",
        reach="one host",
        offers=("frozen", "live", "ring"),
        summary="shared memory that ranks map read-only; on CUDA devices, IPC handles",
        extra=None,
        transport_source=_ipc_transport_source,
        reader=_ipc_reader,
    ),
    Mode(
        name="ipc_snapshot",
        reach="files",
        offers=("frozen",),
        summary="part files that the source writes and ranks read, block by block; no socket, also after the source is gone",
        extra=None,
        transport_source=_snapshot_transport_source,
        reader=_snapshot_reader,
        sharded=False,
    ),
    Mode(
        name="gdr",
        reach="any host",
        offers=("frozen", "live"),
        summary="NIXL: one-sided reads of the source's memory, straight into the shadow",
        extra="nixl",
        transport_source=partial(_nixl_transport_source, "gdr"),
        reader=partial(_nixl_reader, "gdr"),
        devices=("cpu",),
    ),
    Mode(
        name="rdma",
        reach="any host",
        offers=("frozen", "live"),
        summary="NIXL: the same reads into a bounded buffer of host memory, copied to the shadow from there",
        extra="nixl",
        transport_source=partial(_nixl_transport_source, "rdma"),
        reader=partial(_nixl_reader, "rdma"),
        devices=("cpu",),
    ),
)

TRANSPORTS: Mapping[str, Mode] = MappingProxyType({entry.name: entry for entry in _MODES})
"""Every transfer mode, by name."""
