"""Where one user's sockets and secret lie on one host when nobody says otherwise: both sides find the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from liveweight.wire.credentials import socket_directory


def default_directory() -> Path:
    """Where this user's sockets and secret lie when nobody says otherwise."""
    return Path(tempfile.gettempdir()) / f"liveweight-{os.getuid()}"


def default_secret_file() -> Path:
    """Where this user's secret lies when nobody says otherwise; its directory is made if it is not there."""
    return socket_directory(default_directory()) / "secret"
