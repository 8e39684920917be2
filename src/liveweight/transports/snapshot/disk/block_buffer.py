"""The block buffer: host memory for one block or window of a snapshot, as much as a writer or reader has in memory at a time."""

from __future__ import annotations

from liveweight.devices.cpu import allocate
from liveweight.devices.device import CPU, Device
from liveweight.devices.memory import Memory


def block_memory(device: Device, size_bytes: int) -> Memory:
    """Memory of the host that the device copies from and to; the host's own needs no torch."""
    what = "a block of a snapshot"
    if device is CPU:
        return allocate(size_bytes, what).memory
    return Memory.of_view(device.allocate_host([size_bytes], what)[0])
