"""One process of a trainer of several: trains, and says in JSON what it saw. Started by test_trl_processes.py, once per process.

Arguments: the model, the place for files, the engine's URL, and how the model is spread: `ddp`, `fsdp2`, `fsdp2-lora`. After training it
waits for a line on stdin: the test has killed the engine then, and an evaluation must fail at every process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from liveweight.errors import LiveWeightError
from liveweight.integrations.trl import attach
from tests.trl.harness import logged, make_trainer


def spread_over_cpus(trainer: Any) -> None:
    """accelerate has FSDP on accelerators only: on CPUs it must be told."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    trainer.is_fsdp_enabled = True


def main(model: str, place: str, url: str, spread: str) -> None:
    """Train, wait, fail."""
    torch.set_num_threads(1)
    peft = None
    if spread.endswith("lora"):
        from peft import LoraConfig

        peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(
        Path(model),
        Path(place),
        per_device_train_batch_size=4,
        temperature=0.7,
        evaluate=True,
        peft=peft,
        max_grad_norm=0.0,
    )
    if spread.startswith("fsdp2"):
        spread_over_cpus(trainer)
    attached = attach(trainer, engines=[url], recover_s=2.0, timeout_s=10.0)
    trainer.train()
    trainer.evaluate()
    sharded = any(type(one).__name__ == "DTensor" for one in trainer.model.state_dict().values())
    verified = None
    if attached.publisher is not None and trainer.accelerator.is_main_process:
        verified = attached.publisher.verify().match
    say(
        index=trainer.accelerator.process_index,
        sharded=sharded,
        verified=verified,
        publishes=attached.publisher is not None,
        rewards=logged(trainer, "reward"),
        difference=max(logged(trainer, "sampling/sampling_logp_difference/max")),
        seconds=logged(trainer, "weight_sync/total_s"),
    )
    sys.stdin.readline()
    attached.weights_changed()
    try:
        trainer.evaluate()
        error = None
    except LiveWeightError as failed:
        error = f"{failed.code} {failed}"
    say(error=error)
    attached.close()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # else a process that ends first has gloo abort the other


def say(**what: Any) -> None:
    """One line for the test."""
    print(json.dumps(what), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
