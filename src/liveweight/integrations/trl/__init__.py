"""TRL's trainers on liveweight's engines: rollouts come from engines that serve exactly the trainer's weights.

    from liveweight.integrations.trl import attach

    attach(trainer, engines=["http://127.0.0.1:8000"])   # a GRPOTrainer or an RLOOTrainer, made with use_vllm=False
    trainer.train()

An AsyncGRPOTrainer takes `WeightTransfer(engines=[...])` as its `weight_transfer`. docs/trl.md is the user's page. TRL is used through the
trainer that is given, and imported when `attach` is called.
"""

from liveweight.integrations.trl.attach import Attachment, attach
from liveweight.integrations.trl.weight_transfer import WeightTransfer

__all__ = ["Attachment", "WeightTransfer", "attach"]
