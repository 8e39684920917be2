"""A real GRPO run of TRL on a CPU; its rollouts come from an engine that serves exactly the trainer's weights.

    liveweight init-model model && liveweight serve model --port 8000      # in one terminal
    python examples/trl_grpo.py model http://127.0.0.1:8000                # in another: the reward rises from 0.01 to 1 in 20 steps

The lines that end with `# liveweight` are all that it takes. Without them TRL generates by itself, in the trainer's process.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from liveweight.integrations.trl import attach  # liveweight


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """The reward: which share of the answer's characters are digits."""
    return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Train, and print the mean reward of every step."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model")
    arguments.add_argument("engine", nargs="?")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(chosen.model),
            share_of_digits,
            GRPOConfig(
                output_dir=place,
                max_steps=chosen.steps,
                seed=chosen.seed,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                per_device_train_batch_size=64,
                num_generations=16,
                max_completion_length=16,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            Dataset.from_dict({"prompt": [f"Number {n}:" for n in range(64)]}),
            processing_class=AutoTokenizer.from_pretrained(chosen.model),
        )
        attach(trainer, engines=[chosen.engine])  # liveweight
        trainer.train()
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        print("reward " + " ".join(f"{reward:.2f}" for reward in rewards), flush=True)


if __name__ == "__main__":
    main()
