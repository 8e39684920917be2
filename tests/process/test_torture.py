"""The torture at a small size: the embedded engine is spotless under every kind of strike, and the detector finds torn tokens in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def tortured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What it writes; its exit code must say the same."""
    place = tmp_path / "torture.json"
    command = [sys.executable, "-m", "liveweight.cli.main", "torture", *arguments, "--json", str(place)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    assert (ended.returncode == 0) == found.get("holds"), (ended.stdout, ended.stderr, found)
    return found


@pytest.mark.timeout(600)
def test_the_embedded_engine_withstands_it(tmp_path: Path) -> None:
    found = tortured(tmp_path, "--kills", "16", "--seed", "3")
    assert found["holds"], found
    assert {name: found[name] for name in ("torn_tokens", "late_waits", "leaks", "lost")} == dict.fromkeys(
        ("torn_tokens", "late_waits", "leaks", "lost"), 0
    )
    assert sum(found["struck"].values()) == found["kills"] == 16
    assert sum(found["moments"].values()) == 16
    assert found["rounds"] >= found["committed"] > 0
    assert found["tokens"] > 0


@pytest.mark.timeout(600)
def test_updates_in_place_are_torn_by_it(tmp_path: Path) -> None:
    found = tortured(tmp_path, "--target", "in-place", "--kills", "8")
    assert found["torn_tokens"] > 0
    assert found["lost"] == 0
