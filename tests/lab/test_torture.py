"""The torture at a small size: the embedded engine is spotless under every kind of strike, and the detector finds torn tokens in place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.torture import tortured


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
