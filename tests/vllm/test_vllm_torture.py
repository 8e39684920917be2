"""`liveweight torture --target vllm` at a small size: a real server is spotless under every kind of strike, killed ones come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.torture import tortured
from tests.vllm.serving import VLLM_PYTHON

pytestmark = [pytest.mark.timeout(3000), pytest.mark.soak]
SEED = "16"
"""Its first ten strikes are of every kind: the fifth kills the server, and the first stops a trainer past its deadline."""


def test_vllm_withstands_it_and_is_brought_up_to_date_when_it_was_killed(place: Path, tmp_path: Path) -> None:
    del place  # vLLM is there
    target = ("--target", "vllm", "--vllm-python", str(VLLM_PYTHON))
    found = tortured(tmp_path, *target, "--kills", "10", "--seed", SEED, within_s=2500.0)
    assert found["holds"], found
    assert {name: found[name] for name in ("torn_tokens", "late_waits", "leaks", "lost")} == dict.fromkeys(
        ("torn_tokens", "late_waits", "leaks", "lost"), 0
    )
    assert sum(found["struck"].values()) == found["kills"] == 10
    assert found["restarts"] == found["struck"]["kill server"] == 1
    assert found["committed"] > 10, "a round goes through after every strike, and one before the first"
    assert found["tokens"] > 0
