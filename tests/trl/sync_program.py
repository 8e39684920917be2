"""One process of an AsyncGRPOTrainer's weight sync: TRL's own `_sync_weight`, which needs no GPU, around a `WeightTransfer`.

Arguments: the model, the engine's URL, and `whole` or `fsdp2`. The embeddings are frozen. It says in JSON what it saw after the first sync,
waits for a line on stdin, changes the weights and syncs again, and says how that ended.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

from liveweight.errors import LiveWeightError
from liveweight.integrations.trl import WeightTransfer


def async_trainer(model: Any, accelerator: Accelerator, transfer: WeightTransfer) -> SimpleNamespace:
    """What TRL's methods read of an AsyncGRPOTrainer. The class itself wants flash attention, which no CPU has."""
    trainer = SimpleNamespace(
        model=model,
        accelerator=accelerator,
        weight_transfer=transfer,
        rollout_worker=None,
        model_version=0,
        _lora_sync=False,
        _metrics={"train": defaultdict(list)},
    )
    for name in ("_sync_weight", "_sync_weight_merged", "_streaming_iter"):
        setattr(trainer, name, partial(getattr(AsyncGRPOTrainer, name), trainer))
    return trainer


def main(directory: str, url: str, spread: str) -> None:
    """Sync, wait, sync."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.get_input_embeddings().weight.requires_grad_(requires_grad=False)
    if spread == "fsdp2":
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    transfer = WeightTransfer(engines=[url], model=model, timeout_s=10.0)
    trainer = async_trainer(model, accelerator, transfer)
    if accelerator.is_main_process:
        transfer.init_weight_transfer()
    say(**synced(trainer, 1.0))
    sys.stdin.readline()
    say(**synced(trainer, 2.0))
    transfer.destroy()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def synced(trainer: SimpleNamespace, value: float) -> dict[str, Any]:
    """Give the last norm that value, let TRL sync, and return what came of it."""
    transfer = trainer.weight_transfer
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(value)
    error = None
    try:
        trainer._sync_weight()
    except LiveWeightError as failed:
        error = f"{failed.code} {failed}"
        trainer.accelerator.wait_for_everyone()  # where the other processes are, having run their iterators to the end
    verified = None
    if transfer.publisher is not None and error is None:
        verified = transfer.publisher.verify().match
    return {
        "error": error,
        "verified": verified,
        "version": trainer.model_version,
        "kept": [] if transfer.report is None else list(transfer.report.replicas[0].kept),
        "label": None if transfer.report is None else transfer.report.version.label,
    }


def say(**what: Any) -> None:
    """One line for the test."""
    print(json.dumps(what), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
