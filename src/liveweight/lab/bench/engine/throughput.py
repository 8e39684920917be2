"""The embedded engine beside transformers' `generate`: the same model, the same prompts, the same cores, turn by turn in one run.

Both decode greedily, the same number of tokens for every prompt; prompts are equally long, so that transformers, which pads a batch, wastes
nothing. Each runs as its users would run it: transformers as one batch, the engine as so many requests at once.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.serving.requests import Delta, Sampling
from liveweight.errors import DeadlineExceeded, MissingExtra

WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to measure. `model` is a directory; None makes one of that size and architecture, with random weights."""

    model: Path | None = None
    size: Literal["tiny", "small", "1b"] = "small"
    arch: Literal["qwen3", "qwen3_moe"] = "qwen3"
    tp: int = 2
    prompts: int = 16
    prompt_tokens: int = 32
    new_tokens: int = 64
    repeats: int = 5


def bench_engine(settings: EngineSettings) -> dict[str, Any]:
    """Measure. Returns the figures as they are written to JSON."""
    with ExitStack() as stack:
        directory = settings.model
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            init_model(directory, SIZES[settings.arch][settings.size])
        config = EngineConfig(
            model=str(directory),
            tp=settings.tp,
            max_running=max(16, settings.prompts),
            prefix_cache=False,  # the same prompts come again: it would be no comparison
        )
        engine = stack.enter_context(Engine(config))
        theirs = _transformers(directory, settings)
        prompts = _prompts(settings, engine.vocab)
        ours_s: list[float] = []
        theirs_s: list[float] = []
        same = 0
        for turn in range(settings.repeats + 1):
            expected, took_theirs = _timed(lambda: theirs(prompts))
            answers, took_ours = _timed(lambda: _generate(engine, prompts, settings.new_tokens))
            same = sum(a == b for a, b in zip(expected, answers, strict=True))
            if turn:  # the first turn warms both
                theirs_s.append(took_theirs)
                ours_s.append(took_ours)
    return _report(settings, ours_s, theirs_s, same)


def _report(
    settings: EngineSettings, ours_s: Sequence[float], theirs_s: Sequence[float], same: int
) -> dict[str, Any]:
    tokens, median = settings.prompts * settings.new_tokens, statistics.median
    return {
        "model": str(settings.model or f"{settings.arch} {settings.size}"),
        "tp": settings.tp,
        "cores": os.cpu_count(),
        "prompts": settings.prompts,
        "prompt_tokens": settings.prompt_tokens,
        "new_tokens": settings.new_tokens,
        "same_answers": same,
        "tokens_per_s": tokens / min(ours_s),
        "transformers_tokens_per_s": tokens / min(theirs_s),
        "ratio": min(theirs_s) / min(ours_s),
        "median_tokens_per_s": tokens / median(ours_s),
        "median_transformers_tokens_per_s": tokens / median(theirs_s),
        "median_ratio": median(theirs_s) / median(ours_s),
    }


def _timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    began_s = time.perf_counter()
    answers = run()
    return answers, time.perf_counter() - began_s


def _prompts(settings: EngineSettings, vocab: int) -> list[list[int]]:
    """Prompts that differ in their first token already."""
    return [
        [(number * 31 + position * 17 + 7) % (vocab - 8) + 4 for position in range(settings.prompt_tokens)]
        for number in range(settings.prompts)
    ]


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """All prompts at once, through the engine."""
    pieces: queue.Queue[tuple[int, Delta]] = queue.Queue()
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, sampling, lambda delta, number=number: pieces.put((number, delta)))  # type: ignore[misc]
    answers: list[list[int]] = [[] for _ in prompts]
    left = len(prompts)
    while left:
        try:
            number, delta = pieces.get(timeout=WAIT_S)
        except queue.Empty:
            raise DeadlineExceeded("the engine's next token", WAIT_S) from None
        if delta.fault is not None:
            raise delta.fault
        answers[number] += [token.id for token in delta.tokens]
        left -= delta.last
    return answers


def _transformers(
    directory: Path, settings: EngineSettings
) -> Callable[[Sequence[Sequence[int]]], list[list[int]]]:
    """All prompts at once, through `generate`, with every core."""
    import torch

    try:
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise MissingExtra("comparing with transformers", "bench") from error
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()

    def generate(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        given = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=settings.new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers: list[list[int]] = made[:, given.shape[1] :].tolist()
        return answers

    return generate
