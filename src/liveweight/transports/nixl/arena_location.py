"""Where an arena lies for readers of other processes: as a source tells it, and as a rank checks it."""

from __future__ import annotations

import msgspec

from liveweight.errors import MessageInvalid
from liveweight.spec.decoding import from_msgpack
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
        """As it travels."""
        return msgspec.msgpack.encode(self)


def place_from(entry: bytes, size_bytes: int) -> ArenaLocation:
    """What a source said of a memory that its layout gives this size; MessageInvalid for what cannot be."""
    try:
        place = from_msgpack(entry, ArenaLocation)
    except msgspec.DecodeError as error:
        raise MessageInvalid(f"no place of an arena: {error}") from error
    if place.size_bytes != size_bytes:
        raise MessageInvalid(
            f"the source's arena has {place.size_bytes} bytes, its layout needs {size_bytes}"
        )
    if not 0 < place.address < _ADDRESSES - DATA_OFFSET_BYTES - size_bytes:
        raise MessageInvalid(f"the source's arena lies at {place.address}, where no memory is")
    if not 0 < len(place.description) <= DESCRIPTION_BYTES_MAX:
        raise MessageInvalid(f"the source describes itself in {len(place.description)} bytes")
    return place
