"""CUDA IPC handles as bytes: what crosses between two processes that share a GPU's memory.

Owns the bytes and their checks: torch does not check what it is given to open. cuda.py makes and opens handles.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from liveweight.errors import MessageInvalid, MessageTooLarge
from liveweight.spec.decoders import msgpack_decoder

HANDLE_BYTES = 1 << 20
"""What an encoded handle may take. A plain one takes under 300; one of an expandable segment names each of its pieces."""

_IPC_BYTES = 64  # of cudaIpcMemHandle_t and cudaIpcEventHandle_t
_COUNTERS = 10_000  # torch's readers in one file of counters: it writes there without a check of its own
_SIZE_LIMIT = 1 << 60

_Size = Annotated[int, msgspec.Meta(ge=1, lt=_SIZE_LIMIT)]
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=_SIZE_LIMIT)]


class CudaHandle(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cuda_ipc", forbid_unknown_fields=True
):
    """A storage of another process: which GPU has it, where in which allocation, and torch's counter of its one reader."""

    gpu: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """The GPU's UUID: an index means another GPU in another process."""
    size_bytes: _Size
    offset_bytes: _Offset
    memory: Annotated[bytes, msgspec.Meta(min_length=_IPC_BYTES)]
    counter: Annotated[str, msgspec.Meta(pattern=r"\A/torch_[0-9A-Za-z_-]{1,200}\Z")]
    counter_offset: Annotated[int, msgspec.Meta(ge=0, lt=_COUNTERS)]
    event: Annotated[bytes, msgspec.Meta(min_length=_IPC_BYTES, max_length=_IPC_BYTES)]
    """What the reader waits for on its device, if it `waits`: that the owner has written what it had queued."""
    waits: bool


_decoder: msgspec.msgpack.Decoder[CudaHandle] = msgpack_decoder(CudaHandle)


def encode_handle(handle: CudaHandle) -> bytes:
    """The bytes of a handle."""
    encoded = msgspec.msgpack.encode(handle)
    if len(encoded) > HANDLE_BYTES:
        raise MessageTooLarge(len(encoded), HANDLE_BYTES)
    return encoded


def decode_handle(encoded: bytes) -> CudaHandle:
    """The handle in these bytes; a WireError, and nothing else, for any other bytes."""
    if len(encoded) > HANDLE_BYTES:
        raise MessageTooLarge(len(encoded), HANDLE_BYTES)
    try:
        return _decoder.decode(encoded)
    except Exception as error:  # whatever a decoder may raise, nesting without end included
        raise MessageInvalid(f"no CUDA handle of ours: {error}") from error
