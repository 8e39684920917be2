"""CUDA devices: memory on a GPU, and its IPC handles for other processes.

Owns the CUDA half of the device port, and in `TorchDriver` the few calls that only a machine with a GPU can run. The bytes of a
handle are in cuda_handle.py; copying and digesting in torch_kernels.py. This module imports anywhere, and imports no torch.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from liveweight.devices.cpu import allocate_tensors, out_of_memory
from liveweight.devices.cuda_handle import CudaHandle, decode_handle, encode_handle
from liveweight.devices.kernels import ChosenKernels, Kernels
from liveweight.devices.memory import Memory
from liveweight.errors import LayoutInvalid, MessageInvalid, Unavailable

if TYPE_CHECKING:
    import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,3})")


class Driver(Protocol):
    """The calls that need a GPU, by the index that this process gives it. Failures are torch's own, not yet translated."""

    def reason(self) -> str | None:
        """Why CUDA cannot be used here; None: it can."""

    def count(self) -> int:
        """How many devices this process sees."""

    def device(self, index: int) -> torch.device:
        """Where torch says that its tensors are."""

    def gpu(self, index: int) -> str:
        """Its UUID: an index means another GPU in another process."""

    def total_bytes(self, index: int) -> int:
        """How much memory it has."""

    def zeros(self, index: int, size_bytes: int) -> torch.Tensor:
        """Bytes in a storage of their own."""

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """torch's eight values for one opening of a storage."""

    def open(self, index: int, handle: CudaHandle) -> torch.UntypedStorage:
        """The storage of another process."""

    def pin(self, index: int, address: int, size_bytes: int) -> None:
        """Lock pages of the host so that the device reaches them itself."""

    def unpin(self, index: int, address: int) -> None:
        """What was pinned there is ordinary memory again."""

    def synchronise(self, index: int) -> None:
        """Wait for everything queued by this process, on all streams."""

    def side_stream(self, index: int) -> AbstractContextManager[None]:
        """What is queued inside goes to a side stream, behind what the current stream holds, and is done at the end."""


class TorchDriver:
    """The calls, made to torch."""

    def reason(self) -> str | None:
        """Why CUDA cannot be used here; None: it can."""
        try:
            import torch
        except ImportError:
            return "torch is not installed"
        if torch.version.cuda is None and torch.version.hip is None:
            return "torch was built without CUDA"
        return None if torch.cuda.is_available() else "torch finds no CUDA driver or no CUDA device"

    def count(self) -> int:
        """How many devices torch sees."""
        import torch

        return torch.cuda.device_count()

    def device(self, index: int) -> torch.device:
        """torch's name for it."""
        import torch

        return torch.device("cuda", index)

    def gpu(self, index: int) -> str:
        """Its UUID."""
        import torch

        return str(torch.cuda.get_device_properties(index).uuid)

    def total_bytes(self, index: int) -> int:
        """How much memory it has."""
        import torch

        return int(torch.cuda.get_device_properties(index).total_memory)

    def zeros(self, index: int, size_bytes: int) -> torch.Tensor:
        """Bytes from torch's allocator."""
        import torch

        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.device(index))

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """One more reader, counted by torch."""
        values: tuple[Any, ...] = storage._share_cuda_()  # type: ignore[no-untyped-call]
        return values

    def open(self, index: int, handle: CudaHandle) -> torch.UntypedStorage:
        """The storage, for as long as it is held here."""
        import torch

        return torch.UntypedStorage._new_shared_cuda(
            *(index, handle.memory, handle.size_bytes, handle.offset_bytes),
            *(handle.counter.encode("ascii"), handle.counter_offset, handle.event, handle.waits),
        )

    def pin(self, index: int, address: int, size_bytes: int) -> None:
        """Registered where they are: torch's own pinned memory comes in powers of two, up to twice of what is needed."""
        import torch

        with torch.cuda.device(index):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))

    def unpin(self, index: int, address: int) -> None:
        """Not registered any more."""
        import torch

        with torch.cuda.device(index):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

    def synchronise(self, index: int) -> None:
        """All streams of the device: whoever trains or decodes may use another than the calling thread's."""
        import torch

        torch.cuda.synchronize(index)

    @contextmanager
    def side_stream(self, index: int) -> Iterator[None]:
        """A stream of torch's pool: on the default one, decoding would wait for what is queued here."""
        import torch

        side = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(index))
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            side.synchronize()


class CudaDevice:
    """One GPU, by its index. ValueError for a name without one: the current device is nobody's choice.

    `handles` is itself. torch counts the handles: memory whose handle was never opened, or whose reader was killed, is not
    freed before this process ends. A process cannot open its own.
    """

    def __init__(self, name: str, driver: Driver | None = None) -> None:
        self._driver: Driver = TorchDriver() if driver is None else driver
        self._index, self.name = device_index(name), name
        reason = self._driver.reason()
        if reason is not None:
            raise Unavailable(f"{name} cannot be used here: {reason}")
        count = self._driver.count()
        if self._index >= count:
            raise Unavailable(f"there is no {name}: torch finds {count} CUDA devices")
        self.torch_device = self._driver.device(self._index)
        self._gpu = self._driver.gpu(self._index)
        self.identity = f"GPU {self._gpu}"

    @property
    def handles(self) -> CudaDevice:
        """Lends and borrows by IPC handle."""
        return self

    def choose(self) -> ChosenKernels:
        """torch's kernels, on a side stream."""
        from liveweight.devices.torch_kernels import TorchKernels

        return ChosenKernels(
            kernels=TorchKernels(
                self.torch_device, side_stream=lambda: self._driver.side_stream(self._index)
            ),
            name=f"torch ({self.name})",
            reason=f"the native ones do not reach the memory of {self.name}",
        )

    def allocate(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Each a storage of its own; the zeros are written when this returns, whichever stream is used next."""
        import torch

        try:
            with torch.inference_mode(False):
                parts = [self._driver.zeros(self._index, size) for size in sizes_bytes]
        except torch.OutOfMemoryError as error:
            raise out_of_memory(f"{what} on {self.name}", sum(sizes_bytes), error) from error
        self.synchronise()
        return parts

    def allocate_host(self, sizes_bytes: Sequence[int], what: str) -> list[torch.Tensor]:
        """Pages of the host, pinned as long as any part of them is held."""
        pages, parts = allocate_tensors(sizes_bytes, what)
        address = int(pages.ctypes.data)
        if pages.nbytes:
            try:
                self._driver.pin(self._index, address, pages.nbytes)
            except RuntimeError as error:
                raise out_of_memory(f"{what}, pinned for {self.name},", pages.nbytes, error) from error
            # Called when the last part is let go of, before its pages are. Not at exit: the driver is gone by then.
            weakref.finalize(pages, self._driver.unpin, self._index, address).atexit = False
        return parts

    def to_host(self) -> Kernels:
        """torch's, on a side stream of the device."""
        from liveweight.devices.torch_kernels import TorchKernels

        return TorchKernels("cpu", side_stream=lambda: self._driver.side_stream(self._index))

    def give_back(self, memories: Sequence[Memory]) -> int:
        """See Device: torch's allocator does not part with pages and keep their addresses."""
        raise Unavailable(f"{self.name} gives no memory back that tensors point at ({len(memories)})")

    def synchronise(self) -> None:
        """Wait for all streams of the device."""
        self._driver.synchronise(self._index)

    def lend(self, memory: Memory) -> bytes:
        """A handle of the storage that this memory is, for one opening in another process."""
        import torch

        owner = memory.owner
        if not isinstance(owner, torch.Tensor) or owner.device != self.torch_device or not memory.size_bytes:
            raise LayoutInvalid(f"{memory.size_bytes} bytes that are no memory of {self.name} to lend")
        storage = owner.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) != (memory.address, memory.size_bytes):
            raise LayoutInvalid(f"memory of {self.name} that is only a part of its storage cannot be lent")
        try:
            values = self._driver.share(storage)
        except RuntimeError as error:
            raise Unavailable(f"memory of {self.name} cannot be lent: {error}") from error
        _, raw, size, offset, counter, counter_offset, event, waits = values
        return encode_handle(
            CudaHandle(
                gpu=self._gpu,
                size_bytes=size,
                offset_bytes=offset,
                memory=raw,
                counter=counter.decode("ascii"),
                counter_offset=counter_offset,
                event=event,
                waits=waits,
            )
        )

    def borrow(self, handle: bytes, size_bytes: int) -> Memory:
        """What another process lent of this GPU. It must be gone here before its owner has the memory back."""
        found = decode_handle(handle)
        if found.gpu != self._gpu:
            raise LayoutInvalid(f"the memory is on GPU {found.gpu}, but {self.name} is {self.identity}")
        total = self._driver.total_bytes(self._index)
        if found.size_bytes != size_bytes or size_bytes > total:
            raise MessageInvalid(
                f"a handle of {found.size_bytes} bytes for {size_bytes}; {self.name} has {total}"
            )
        from liveweight.devices.torch_kernels import storage_bytes

        try:
            opened = storage_bytes(self._driver.open(self._index, found))
        except RuntimeError as error:
            raise Unavailable(
                f"{self.name} cannot open the handle; its owner may be gone, or have another torch: {error}"
            ) from error
        if opened.numel() != size_bytes or opened.device != self.torch_device:
            raise Unavailable(
                f"asked for {size_bytes} bytes on {self.name}, torch opened {opened.numel()} on {opened.device}"
            )
        return Memory.of_view(opened, writable=False)


def available() -> str | None:
    """None where CUDA can be used; else why not."""
    return TorchDriver().reason()


def device_index(device: str | torch.device) -> int:
    """Which CUDA device is named. ValueError where none is, or one without an index."""
    name, found = str(device), _DEVICE.fullmatch(str(device))
    if name == "cuda":
        raise ValueError("device cuda has no index: name one, as in cuda:0")
    if found is None:
        raise ValueError(f"device {name} is no CUDA device with an index, as in cuda:0")
    return int(found[1])
