"""The trainer's model: transformers' own Qwen3, one optimiser, and the weights of its last few versions.

Owns the parameters. The kept versions are copies, for recomputing an engine's logprobs; publishing reads the parameters themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liveweight.engine.text import Tokenizer
from liveweight.errors import MissingExtra
from liveweight.lab.demo.learning.grpo import TrainingBatch, batch_of, informative, loss
from liveweight.lab.demo.learning.samples import SampleGroup
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.lab.demo.settings import Training

if TYPE_CHECKING:
    import torch

BETAS = (0.9, 0.95)


class Policy:
    """One trainer. For one thread."""

    def __init__(self, directory: Path, training: Training, *, keep: int) -> None:
        import torch

        self.training, self._keep = training, keep
        self.model = _load(directory)
        self._tokenizer = Tokenizer.load(directory)
        self._end = int(self.model.config.eos_token_id)
        self._parameters = dict(self.model.named_parameters())
        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=training.warmup_rate, betas=BETAS, weight_decay=0.0
        )
        self._versions: dict[int, dict[str, torch.Tensor]] = {}

    def imitate(self, task: SortDigits, chance: random.Random) -> float:
        """One supervised step on fresh demonstrations. Returns its loss."""
        import torch

        questions = [task.question(chance) for _ in range(self.training.warmup_batch)]
        rows = [
            self._encode(q) + self._encode(task.demonstration(q, chance)) + [self._end] for q in questions
        ]
        tokens, prompt = torch.tensor(rows), task.digits + 1
        found = self._logprobs(tokens, prompt, tokens[:, prompt:])
        return self._step(-found.mean())

    def begin_rl(self) -> None:
        """Start with a new optimiser: its statistics of imitation do not fit RL."""
        import torch

        self._optimiser = torch.optim.AdamW(
            self._parameters.values(), lr=self.training.rate, betas=BETAS, weight_decay=0.0
        )

    def learn(self, groups: Sequence[SampleGroup], *, done: float) -> float:
        """One step of GRPO. Returns its loss; 0 if the answers of no group differ in reward. `done`: the share of the run that is over."""
        import torch

        samples, found = informative(groups)
        if not samples:
            return 0.0
        for settings in self._optimiser.param_groups:
            settings["lr"] = self.rate_at(done)
        batch = batch_of(samples)
        now = self.logprobs(batch)
        value = loss(
            now,
            batch.sampled,
            torch.tensor(found),
            batch.mask,
            clip_low=self.training.clip_low,
            clip_high=self.training.clip_high,
        )
        return self._step(value)

    def rate_at(self, done: float) -> float:
        """The learning rate when this share of the run is over."""
        return self.training.rate * (1 - done * (1 - self.training.rate_end))

    def logprobs(self, batch: TrainingBatch, version: int | None = None) -> torch.Tensor:
        """The logprob of every drawn token, under the current weights or those of a kept version."""
        return self._logprobs(batch.tokens, batch.prompt_tokens, batch.drawn, version)

    def keep(self, version: int) -> None:
        """Keep a copy of the current weights as that version, and drop the oldest."""
        self._versions[version] = {name: one.detach().clone() for name, one in self._parameters.items()}
        for old in sorted(self._versions)[: -self._keep]:
            del self._versions[old]

    def kept(self) -> frozenset[int]:
        """The versions whose weights are kept."""
        return frozenset(self._versions)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the current weights."""
        return {name: one.detach().clone() for name, one in self._parameters.items()}

    def restore(self, weights: dict[str, torch.Tensor]) -> None:
        """Load such a copy, and drop all kept versions."""
        import torch

        with torch.no_grad():
            for name, one in self._parameters.items():
                one.copy_(weights[name])
        self._versions.clear()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def _logprobs(
        self, tokens: torch.Tensor, prompt: int, drawn: torch.Tensor, version: int | None = None
    ) -> torch.Tensor:
        import torch

        how: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if version is None:
            logits = self.model(**how).logits
        else:
            logits = torch.func.functional_call(self.model, self._versions[version], (), how).logits
        found = logits[:, prompt - 1 : -1].log_softmax(-1).gather(2, drawn[:, :, None])
        return torch.as_tensor(found[:, :, 0])

    def _step(self, value: torch.Tensor) -> float:
        import torch

        self._optimiser.zero_grad()
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.training.gradient_norm)
        self._optimiser.step()
        return float(value.detach())


def _load(directory: Path) -> Any:
    try:
        from transformers import Qwen3ForCausalLM
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise MissingExtra("the demo", "demo") from error
    import torch

    logging.disable_progress_bar()
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
