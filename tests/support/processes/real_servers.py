"""Real engines behind real HTTP, what transformers says about the same directories, and waiting for states."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.status import Status
from tests.support.engine.engines import WITHIN_S, forking
from tests.support.processes.fork_server import Zygote
from tests.support.processes.http_server import Served, serving

LOOK_AGAIN_S = 0.02


@contextmanager
def serving_model(zygote: Zygote, directory: Path, **settings: Any) -> Iterator[Served[Engine]]:
    """An engine with forked ranks behind a server of its own; both end with the block."""
    config = EngineConfig(model=str(directory), threads=1, **settings)
    with Engine(config, launch=forking(zygote)) as engine, serving(engine) as served:
        yield served


def until(holds: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    """Wait for a state that nobody announces."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s} s: {what}")
        pause.wait(LOOK_AGAIN_S)


def quiet(engine: Engine) -> Status:
    """The status once nothing runs or waits any more, and every page is back."""

    def holds() -> bool:
        now = engine.status()
        return now.running == now.waiting == 0 and now.blocks_free == now.blocks_total

    until(holds, "an engine without requests, and with all its pages")
    return engine.status()


class Reference:
    """HF transformers on a directory, in float32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.words: Any = AutoTokenizer.from_pretrained(directory)

    def encode(self, text: str) -> list[int]:
        """A text's tokens."""
        return [int(token) for token in self.words(text)["input_ids"]]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation's tokens, up to where the answer begins."""
        text = self.words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return [int(token) for token in self.words(text, add_special_tokens=False)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones."""
        return str(self.words.decode(list(tokens), skip_special_tokens=True))

    def generate(self, prompt: Sequence[int], count: int, **more: Any) -> list[int]:
        """The greedy answer."""
        given = torch.tensor([list(prompt)])
        generated = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, **more
        )
        return [int(token) for token in generated[0, len(prompt) :]]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After each of the tokens."""
        with torch.no_grad():
            table: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return table

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Of every token of the vocabulary, at each position of the answer."""
        return self.logits([*prompt, *answer])[len(prompt) - 1 : -1].log_softmax(-1)

    def experts(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """The experts that the routers choose for every token: [tokens, layers, experts per token]."""
        with torch.no_grad():
            routers = self.model(torch.tensor([list(tokens)]), output_router_logits=True).router_logits
        each = self.model.config.num_experts_per_tok
        chosen = [router.view(len(tokens), -1).topk(each).indices for router in routers]
        return torch.stack(chosen, dim=1).numpy()
