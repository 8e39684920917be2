"""Decoding in many threads at once: types that no thread has used before, as at the start of every program."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
import msgspec
from liveweight.spec.decoders import converted, from_json, from_msgpack

sys.setswitchinterval(1e-6)  # threads run into each other's half-done work
for number in range(60):
    inner = msgspec.defstruct("Inner", [(f"field{n}", list[int] | None, None) for n in range(60)])
    outer = msgspec.defstruct("Outer", [("inner", inner)])
    value = outer(inner(**{f"field{n}": [n] for n in range(60)}))
    text, packed, plain = msgspec.json.encode(value), msgspec.msgpack.encode(value), msgspec.to_builtins(value)
    begin, found = threading.Barrier(6), []

    def decode(way):
        begin.wait()
        found.append(way())

    decoders = [lambda: from_json(text, outer), lambda: from_msgpack(packed, outer), lambda: converted(plain, outer)] * 2
    threads = [threading.Thread(target=decode, args=(way,)) for way in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [value] * 6, found
"""


def test_threads_that_meet_a_type_for_the_first_time_together_all_decode_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
