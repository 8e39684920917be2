"""A trainer that drives nobody: it holds versions on offer, for engines that ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import liveweight as lw
from liveweight.checkpoint import CheckpointSource
from liveweight.wire.credentials import load_or_create_secret
from tests.support.programs.program import Console


def main(config: dict[str, Any]) -> None:
    """The config has model, address, secret, directory, release_s."""
    torch.set_num_threads(1)
    console = Console()
    weights = _read(config["model"])
    with lw.Publisher(
        weights,
        address=config["address"],
        secret=load_or_create_secret(Path(config["secret"])),
        directory=Path(config["directory"]),
        release_s=config["release_s"],
        threads=1,
        run="run",
    ) as publisher:
        console.send(ready="")
        while (command := console.commands.get())["do"] != "stop":
            console.serve(command, lambda asked: _act(asked, publisher, weights))
        console.send(id=command["id"])


def _act(
    command: dict[str, Any], publisher: lw.Publisher, weights: dict[str, torch.Tensor]
) -> dict[str, object]:
    """Take the values of a checkpoint, as training would, and offer them."""
    for name, tensor in _read(command["model"]).items():
        weights[name].copy_(tensor)
    version = publisher.offer(command["label"])
    return {"label": version.label, "digest": version.digest}


def _read(model: str) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in CheckpointSource(Path(model)).tensors()}
