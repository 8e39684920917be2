"""A double of the CUDA driver, backed by files that processes map: every line of the CUDA side but torch.cuda's own calls runs on it.

It keeps the driver's rules: a handle opens once, memory is on one of several GPUs, and what is queued on a side stream is done at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from liveweight.devices.cuda import CudaDevice
from liveweight.devices.cuda_handle import CudaHandle

GPUS = ("8f2a2c0e-1b7a-4c5e-9a3e-0d5f4f6f7a10", "1c9d7e44-52f0-4b1b-8f5b-2a77c3b9d001")
TOTAL_BYTES = 1 << 40


class FakeDriver:
    """Memory is a file in `directory`, mapped; a handle is the file's name and a ticket that its one opening takes."""

    def __init__(self, directory: Path, gpus: tuple[str, ...] = GPUS) -> None:
        self.directory, self.gpus = directory, gpus
        self.homes, self.totals_bytes = [torch.device("cpu")] * len(gpus), [TOTAL_BYTES] * len(gpus)
        self.files: dict[int, str] = {}
        self.used_bytes = 0
        """Memory of all GPUs that was had so far."""
        self.pinned: dict[int, int] = {}
        """Host memory that is pinned: address and size."""
        self.may_pin = True
        self.synchronised: list[int] = []
        """The GPUs that were waited for, in order."""
        self.runs: list[int] = []
        """The GPUs whose side streams work was queued on, in order."""

    def reason(self) -> str | None:
        """It can always be used."""
        return None

    def count(self) -> int:
        """As many GPUs as it was given."""
        return len(self.gpus)

    def device(self, index: int) -> torch.device:
        """Its tensors are the host's."""
        return self.homes[index]

    def gpu(self, index: int) -> str:
        """The UUID."""
        return self.gpus[index]

    def total_bytes(self, index: int) -> int:
        """More than any test needs."""
        return self.totals_bytes[index]

    def zeros(self, index: int, size_bytes: int) -> torch.Tensor:
        """A new file, mapped."""
        if size_bytes > self.total_bytes(index):
            raise torch.OutOfMemoryError(f"tried to allocate {size_bytes} bytes")
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self.used_bytes += size_bytes
        name = f"{self.gpu(index)}-{secrets.token_hex(8)}"
        storage = self._map(name, size_bytes)
        self.files[storage.data_ptr()] = name
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """The values that torch gives, for one opening."""
        name, number = self.files[storage.data_ptr()], secrets.randbelow(10_000)
        ticket = f"/torch_{secrets.token_hex(8)}"
        (self.directory / ticket[1:]).touch()
        handle = name.encode().ljust(66, b"\0")
        return 0, handle, storage.nbytes(), 0, ticket.encode(), number, bytes(64), True

    def open(self, index: int, handle: CudaHandle) -> torch.UntypedStorage:
        """The same file once more. RuntimeError, as torch's, for a second opening or another GPU's memory."""
        name = handle.memory.rstrip(b"\0").decode()
        try:
            (self.directory / handle.counter[1:]).unlink()
        except FileNotFoundError:
            raise RuntimeError("invalid resource handle") from None
        if not name.startswith(self.gpu(index)):
            raise RuntimeError("invalid device context")
        return self._map(name, handle.size_bytes)

    def pin(self, index: int, address: int, size_bytes: int) -> None:
        """Noted. RuntimeError, as the driver's, for what is pinned already, or where there is no more to be had."""
        del index
        if not self.may_pin or address in self.pinned:
            raise RuntimeError("CUDA error: out of memory")
        self.pinned[address] = size_bytes

    def unpin(self, index: int, address: int) -> None:
        """Forgotten."""
        del index
        del self.pinned[address]

    def synchronise(self, index: int) -> None:
        """Counted."""
        self.synchronised.append(index)

    @contextmanager
    def side_stream(self, index: int) -> Iterator[None]:
        """Counted."""
        self.runs.append(index)
        yield

    def unopened(self) -> int:
        """Handles that nobody has opened: a real driver would keep their memory for ever."""
        return len(list(self.directory.glob("torch_*")))

    def _map(self, name: str, size_bytes: int) -> torch.UntypedStorage:
        return torch.from_file(
            str(self.directory / name), shared=True, size=size_bytes, dtype=torch.uint8
        ).untyped_storage()


def fake_cuda(directory: Path, name: str = "cuda:0") -> CudaDevice:
    """A CUDA device that is none."""
    return CudaDevice(name, FakeDriver(directory))
