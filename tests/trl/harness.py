"""What the tests of TRL share: small trainers, an engine as a process that can be killed and started again, and what it says of itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from liveweight.integrations.vllm.server_process import free_port
from tests.arch.source_tree import ROOT

WITHIN_S = 90.0
PROMPTS = [f"Number {number}:" for number in range(64)]


def share_of_digits(completions: list[str], **_: object) -> list[float]:
    """A reward that a tiny model learns in some steps: which share of the answer's characters are digits."""
    return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in completions]


class ServedEngine:
    """`liveweight serve` on a port that it keeps through restarts. Ended with the `with`."""

    def __init__(self, model: Path, place: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = place / f"engine-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "liveweight.cli.main", "serve", str(model), "--port", str(self.port)),
            *("--threads", "1", "--kv-mb", "64", "--grace", "0", *options),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start it; returns when it serves."""
        self.launch()
        self.await_serving()
        return self

    def launch(self) -> None:
        """Start its process, and do not wait."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def await_serving(self) -> None:
        """Wait until it says that it serves."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("serving "), self._log.read_text()

    @property
    def running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """As the kernel would: nothing is released by the process itself."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it, and start it again on the checkpoint that it began with."""
        self.kill()
        self.start()

    def kill_rank(self, rank: int = 0) -> None:
        """Kill one of its ranks; the engine notices by itself."""
        assert self._process is not None
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        pids = sorted(int(pid) for children in threads for pid in children.read_text().split())
        os.kill(pids[rank], signal.SIGKILL)

    def weights(self) -> dict[str, Any]:
        """What it serves, and its last rounds."""
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/weights", timeout=WITHIN_S).json()
        return found

    def rounds(self) -> list[tuple[str, float]]:
        """The labels of the versions that it took, of those it remembers, with how long each took; the newest last."""
        return [
            (one["version"], one["took_s"])
            for one in self.weights()["rounds"]
            if one["outcome"] == "committed"
        ]

    def labels_since(self, before: list[tuple[str, float]]) -> list[str]:
        """The labels of the versions that it took since `rounds` was asked for."""
        return [one[0] for one in self.rounds() if one not in before]

    def prompt_tokens(self) -> float:
        """How many tokens of prompts it was sent, all together."""
        lines = httpx.get(f"{self.url}/metrics", timeout=WITHIN_S).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("liveweight_engine_prompt_tokens_total")
        )

    def __enter__(self) -> Self:
        return self.start() if self._process is None else self

    def __exit__(self, *_: object) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.communicate(timeout=WITHIN_S)


def make_trainer(
    model: Path,
    place: Path,
    *,
    kind: str = "grpo",
    prompts: Sequence[Any] = PROMPTS,
    reward: Callable[..., list[float]] = share_of_digits,
    peft: Any = None,
    evaluate: bool = False,
    more: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A trainer on the CPU: two steps of two groups of four answers, unless the arguments say otherwise. `more` are the trainer's own."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    kinds = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
    make_config, make = kinds[kind]
    settings: dict[str, Any] = {
        "output_dir": str(place / "output"),
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "disable_tqdm": True,
    }
    data = Dataset.from_dict({"prompt": list(prompts)})
    return make(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        make_config(**{**settings, **config}),
        data,
        eval_dataset=data.select(range(2)) if evaluate else None,
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=peft,
        **(more or {}),
    )


def logged(trainer: Any, name: str) -> list[float]:
    """All values of one of the trainer's metrics."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def logprobs(
    model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> torch.Tensor:
    """Of the answer's tokens, by the trainer's own model."""
    with torch.no_grad():
        logits = _logits(model, [*prompt, *answer])[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(list(answer))]


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """TRL changes `forward` so that it gives logprobs; the layers below are as they were."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = base.model(torch.tensor([list(tokens)])).last_hidden_state
    table: torch.Tensor = base.lm_head(hidden)[0]
    return table
