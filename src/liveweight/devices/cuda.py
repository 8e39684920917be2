"""CUDA memory: had on one device that is named, and shared between processes by IPC handle.

Owns what only a machine with CUDA can run, and the bytes of a handle. What is copied and digested there is torch_kernels'; how a handle
travels is wire/'s. This module imports anywhere: where CUDA is absent, its functions raise Unavailable with the reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import msgspec

from liveweight.devices.cpu import out_of_memory
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, MessageInvalid, MessageTooLarge, Unavailable

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 1 << 20
"""What an encoded handle may take. A plain one takes under 300; one of an expandable segment names each of its pieces."""

_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")
_IPC_BYTES = 64  # of cudaIpcMemHandle_t and cudaIpcEventHandle_t
_COUNTERS = 10_000  # torch's readers in one file of counters: it writes there without a check of its own
_SIZE_LIMIT = 1 << 60

_Size = Annotated[int, msgspec.Meta(ge=1, lt=_SIZE_LIMIT)]
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=_SIZE_LIMIT)]


class Handle(
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


_decoder = msgspec.msgpack.Decoder(Handle)


def encode_handle(handle: Handle) -> bytes:
    """The bytes of a handle."""
    encoded = msgspec.msgpack.encode(handle)
    if len(encoded) > HANDLE_BYTES:
        raise MessageTooLarge(len(encoded), HANDLE_BYTES)
    return encoded


def decode_handle(encoded: bytes) -> Handle:
    """The handle in these bytes; a WireError, and nothing else, for any other bytes."""
    if len(encoded) > HANDLE_BYTES:
        raise MessageTooLarge(len(encoded), HANDLE_BYTES)
    try:
        return _decoder.decode(encoded)
    except Exception as error:  # whatever a decoder may raise, nesting without end included
        raise MessageInvalid(f"no CUDA handle of ours: {error}") from error


def available() -> str | None:
    """None where CUDA can be used; else why not."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch was built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA driver or no CUDA device"


def device_index(device: str | torch.device) -> int:
    """Which CUDA device is named. ValueError where none is, or one without an index: the current device is nobody's choice."""
    name = str(device)
    found = _DEVICE.fullmatch(name)
    if name == "cuda":
        raise ValueError("device cuda has no index: name one, as in cuda:0")
    if found is None:
        raise ValueError(f"device {name} is no CUDA device with an index, as in cuda:0")
    return int(found[1])


def allocate(size_bytes: int, device: str | torch.device) -> Memory:
    """That many bytes of zeros on exactly that device. OutOfMemory where they cannot be had. Freed with the last view of the owner."""
    there = _there(device)
    import torch

    from liveweight.devices.torch_kernels import device_memory

    if size_bytes < 0:
        raise ValueError(f"memory of {size_bytes} bytes")
    try:
        return device_memory(torch.zeros(size_bytes, dtype=torch.uint8, device=there))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(f"a shadow on {there}", size_bytes, error) from error


def share(tensor: torch.Tensor) -> bytes:
    """A handle of the tensor's whole storage, for one opening in another process: share once more for each reader, not for each round.

    torch counts them: memory whose handle was never opened, or whose reader was killed, is not had back before this process ends.
    """
    _require()
    storage = tensor.untyped_storage()
    if tensor.device.type != "cuda" or storage.nbytes() == 0:
        raise LayoutInvalid(
            f"a tensor of {storage.nbytes()} bytes on {tensor.device} has no CUDA memory to share"
        )
    try:
        shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise Unavailable(f"memory of {tensor.device} cannot be shared: {error}") from error
    _, memory, size, offset, counter, counter_offset, event, waits = shared
    return encode_handle(
        Handle(
            gpu=_gpu(tensor.device),
            size_bytes=size,
            offset_bytes=offset,
            memory=memory,
            counter=counter.decode("ascii"),
            counter_offset=counter_offset,
            event=event,
            waits=waits,
        )
    )


def open_handle(handle: bytes, device: str | torch.device) -> torch.Tensor:
    """The bytes of a storage that another process shared, on the device given, which must be the GPU that has them. Only to be read.

    Not in the process that shared it: CUDA refuses that. The tensor must be gone before its owner's memory may be reused.
    """
    there, found = _there(device), decode_handle(handle)
    import torch

    from liveweight.devices.torch_kernels import storage_bytes

    if found.gpu != _gpu(there):
        raise LayoutInvalid(f"the memory is on GPU {found.gpu}, but {there} is GPU {_gpu(there)}")
    total = torch.cuda.get_device_properties(there).total_memory
    if found.size_bytes > total:
        raise MessageInvalid(f"a handle of {found.size_bytes} bytes, but {there} has {total}")
    counter = found.counter.encode("ascii"), found.counter_offset
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            *(there.index, found.memory, found.size_bytes, found.offset_bytes),
            *(*counter, found.event, found.waits),
        )
    except RuntimeError as error:
        raise Unavailable(
            f"{there} cannot open the handle; its owner may be gone, or have another torch: {error}"
        ) from error
    return _checked(storage_bytes(storage), found.size_bytes, there)


def synchronise(device: str | torch.device) -> None:
    """Wait until the device has done what the calling thread's current stream holds; other streams go on."""
    there = _there(device)
    import torch

    torch.cuda.current_stream(there).synchronize()


def _checked(opened: torch.Tensor, size_bytes: int, there: torch.device) -> torch.Tensor:
    """What torch rebuilt, if it is what was asked for."""
    if opened.numel() != size_bytes or opened.device != there:
        raise Unavailable(
            f"asked for {size_bytes} bytes on {there}, torch opened {opened.numel()} on {opened.device}"
        )
    return opened


def _require() -> None:
    reason = available()
    if reason is not None:
        raise Unavailable(f"CUDA cannot be used here: {reason}")


def _there(device: str | torch.device) -> torch.device:
    """The device that is named, if this machine has it."""
    _require()
    import torch

    index, count = device_index(device), torch.cuda.device_count()
    if index >= count:
        raise Unavailable(f"there is no cuda:{index}: torch finds {count} CUDA devices")
    return torch.device("cuda", index)


def _gpu(device: torch.device) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
