"""The trainer of the live benchmark: changes a checkpoint's tensors a little, in shared memory, and publishes them on request."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from liveweight.checkpoint import CheckpointSource
from liveweight.lab.bench.child_process import JsonSocket
from liveweight.lab.bench.publishing import publishing
from liveweight.spec.deadline import Deadline
from liveweight.trainer.offers.live import share_module
from liveweight.trainer.settings import PublisherSettings
from liveweight.transports.ipc.arena import SharedArena

WAIT_S = 600.0


def main(line: JsonSocket, config: dict[str, Any]) -> None:
    """Publish on request until the socket closes."""
    import torch

    torch.set_num_threads(1)
    module = module_of_checkpoint(Path(config["model"]))
    with ExitStack() as stack:
        shared = stack.enter_context(share_module(module, SharedArena))
        made = publishing(
            shared,
            addresses=[config["address"]],
            directory=Path(config["directory"]),
            timeout_s=WAIT_S,
            stack=stack,
        )
        line.send(ready=True)
        label = 0
        while (command := line.receive(Deadline.after(WAIT_S)))["do"] == "publish":
            label += 1
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.view(-1)[label % parameter.numel()] += 0.001
            made.publisher.settings = PublisherSettings(
                offer=command["offer"], timeout_s=WAIT_S, kv_policy=command["kv_policy"]
            )
            began_s = time.monotonic()
            report = made.publisher.publish(label)
            line.send(
                took_s=time.monotonic() - began_s,
                stall_s=report.metrics()["weight_sync/stall_s"],
                label=label,
            )
    line.send(done=True)


def module_of_checkpoint(directory: Path) -> Any:
    """The tensors of a checkpoint directory as a module's parameters, under their names."""
    import torch

    module = torch.nn.Module()
    for name, tensor in CheckpointSource(directory).tensors():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return module
