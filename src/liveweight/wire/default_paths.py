"""The default paths of a user's sockets and secret on one host: both sides use the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from liveweight.wire.credentials import socket_directory


def default_directory() -> Path:
    """The default directory of this user's sockets and secret."""
    return Path(tempfile.gettempdir()) / f"liveweight-{os.getuid()}"


def default_secret_file() -> Path:
    """The default path of this user's secret; its directory is made if absent."""
    return socket_directory(default_directory()) / "secret"
