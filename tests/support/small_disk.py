"""A disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of one megabyte; skips the test where none can be mounted."""
    place = directory / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        failed = subprocess.run(mounting, capture_output=True, check=False).returncode != 0
    except FileNotFoundError:
        failed = True
    if failed:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
