"""`liveweight torture` as a program, and what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def tortured(tmp_path: Path, *arguments: str, within_s: float = 500.0) -> dict[str, Any]:
    """What it writes; its exit code must say the same."""
    place = tmp_path / "torture.json"
    command = [sys.executable, "-m", "liveweight.cli.main", "torture", *arguments, "--json", str(place)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    assert (ended.returncode == 0) == found.get("holds"), (ended.stdout, ended.stderr, found)
    return found
