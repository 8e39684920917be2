"""A trainer's environment without torch: everything that a publisher of host tensors does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import liveweight as lw
from tests.arch.source_tree import ROOT

PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it fails
import numpy as np
import liveweight as lw
from liveweight.trainer.sources.host_tensor import HostTensor

values = [np.arange(12, dtype=np.float32).reshape(3, 4) for _ in range(3)]

def tensor(array):
    return HostTensor(address=array.ctypes.data, dtype=lw.DType.FLOAT32, shape=(3, 4), strides=(4, 1), owner=array)

plain, turned, cast = map(tensor, values)
weights = {"plain": plain, "turned": turned.transposed(), "cast": cast}
with lw.Publisher(weights, engines=sys.argv[1:]) as publisher:
    for step in (1, 2):
        for array in values:
            array += 1
        publisher.publish(step)
    print(publisher.verify().match)
"""


def test_host_tensors_are_published_without_torch(short_path: Path) -> None:
    model = {
        "plain": torch.zeros(3, 4),
        "turned": torch.zeros(4, 3, dtype=torch.bfloat16),
        "cast": torch.zeros(3, 4, dtype=torch.float64),
    }
    address = f"ipc://{short_path}/engine.sock"
    command = [sys.executable, "-c", PROGRAM, address]
    with (
        lw.Receiver(model, address=address) as receiver,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer,
    ):
        while trainer.poll() is None:
            receiver.at_boundary()
        assert trainer.stdout is not None
        assert (trainer.returncode, trainer.stdout.read()) == (0, "True\n")
    expected = torch.arange(12.0).reshape(3, 4) + 2
    assert torch.equal(model["plain"], expected)
    assert torch.equal(model["turned"], expected.t().bfloat16())
    assert torch.equal(model["cast"], expected.double())
