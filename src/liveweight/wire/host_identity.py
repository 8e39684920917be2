"""Which host, and which view of its processes, a process id belongs to: only then may one watch over another by its id."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def this_host() -> str:
    """The same for two processes only if a process id means the same to both; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
