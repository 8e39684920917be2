"""A rank's process does not outlive its engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from liveweight.engine.rank.process import _end_with
_end_with(int(sys.argv[1]))
print("watching", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("dies", ["before the rank starts", "later"])
def test_a_rank_ends_with_its_engine(dies: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        if dies != "later":
            engine.kill()
            engine.wait()
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(engine.pid)], stdout=subprocess.PIPE, text=True
        ) as rank:
            assert rank.stdout is not None
            said = rank.stdout.readline()
            assert said == ("watching\n" if dies == "later" else "")
            engine.kill()
            assert rank.wait(60) == -9
