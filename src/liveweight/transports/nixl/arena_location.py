"""Where an arena lies for readers in other processes: as a source sends it, and as a rank checks it."""

from __future__ import annotations

import msgspec

from liveweight.errors import MessageInvalid
from liveweight.spec.decoders import from_msgpack
from liveweight.transports.ipc.arena import DATA_OFFSET_BYTES

DESCRIPTION_BYTES_MAX = 1 << 20
_ADDRESSES = 1 << 63


class ArenaLocation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of an arena's header page in the registration process, the size of its data, and NIXL's description of how to get
    there."""

    address: int
    size_bytes: int
    description: bytes

    @property
    def data(self) -> int:
        """Where the data begins."""
        return self.address + DATA_OFFSET_BYTES

    def encode(self) -> bytes:
        """The location as bytes of a message."""
        return msgspec.msgpack.encode(self)


def location_from(entry: bytes, size_bytes: int) -> ArenaLocation:
    """Decode and check the location of a memory of this size. Raises MessageInvalid."""
    try:
        location = from_msgpack(entry, ArenaLocation)
    except msgspec.DecodeError as error:
        raise MessageInvalid(f"no location of an arena: {error}") from error
    if location.size_bytes != size_bytes:
        raise MessageInvalid(
            f"the source's arena has {location.size_bytes} bytes, its layout needs {size_bytes}"
        )
    if not 0 < location.address < _ADDRESSES - DATA_OFFSET_BYTES - size_bytes:
        raise MessageInvalid(f"the source's arena lies at {location.address}, where no memory is")
    if not 0 < len(location.description) <= DESCRIPTION_BYTES_MAX:
        raise MessageInvalid(f"the source describes itself in {len(location.description)} bytes")
    return location
