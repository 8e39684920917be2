"""Engines for tests: real ranks, forked quickly; checkpoint directories made once; answers collected."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.serving.rank_processes import Launch, RankProcess
from liveweight.engine.serving.requests import Delta, Finish, Sampling, Sink, Token
from liveweight.lab.torture.fork_server import Forked
from tests.support.processes.fork_server import Zygote

WITHIN_S = 90.0
NEAR = 1e-4
"""Two best logits that lie closer than this may change places."""
Arch = Literal["qwen3", "qwen3_moe"]
Dtype = Literal["float32", "bfloat16"]

torch.set_num_threads(1)  # threads that wait for each other on a busy machine cost more than they bring here


def forking(zygote: Zygote, environ: dict[str, str] | None = None) -> Launch:
    """Start ranks by forking, with these variables."""

    def launch(rank: int, end: socket.socket) -> RankProcess:
        del rank
        config: dict[str, object] = {"environ": environ or {}}
        return Forked(zygote.start("tests.support.programs.engine_rank_program", config, end.fileno(), 1))

    return launch


def counting(zygote: Zygote, directory: Path) -> Launch:
    """Start ranks by forking; each writes its collectives' counts to `directory/RANK` when it ends."""

    def launch(rank: int, end: socket.socket) -> RankProcess:
        config: dict[str, object] = {"counts": str(directory / str(rank))}
        return Forked(zygote.start("tests.support.programs.counting_rank_program", config, end.fileno(), 1))

    return launch


class Models:
    """Checkpoint directories, each made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def layers(self) -> int:
        """How many layers a tiny model has."""
        return ModelSpec.read(self.directory()).layers

    def directory(
        self,
        arch: Arch = "qwen3",
        *,
        tied: bool = True,
        mtp: bool = False,
        seed: int = 0,
        dtype: Dtype = "float32",
    ) -> Path:
        """A tiny model."""
        path = self._root / f"{arch}-{tied:d}-{mtp:d}-{seed}-{dtype}"
        if not path.exists():
            init_model(path, SIZES[arch]["tiny"], mtp=mtp, tied=tied, seed=seed, dtype=dtype)
        return path


@dataclass
class Answer:
    """What a request got; `wait` until it has all."""

    pieces: queue.Queue[Delta] = field(default_factory=queue.Queue)
    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    last: Delta | None = None

    def piece(self, within_s: float = WITHIN_S) -> Delta:
        """The next piece."""
        delta = self.pieces.get(timeout=within_s)
        assert self.last is None, "nothing follows the last piece"
        self.tokens += delta.tokens
        self.text += delta.text
        if delta.last:
            self.last = delta
        return delta

    def wait(self) -> Answer:
        """Until the last piece."""
        while self.last is None:
            self.piece()
        return self

    @property
    def ids(self) -> list[int]:
        """The tokens' numbers."""
        return [token.id for token in self.tokens]

    @property
    def finish(self) -> Finish | None:
        """Why it ended; raises what it failed with."""
        assert self.last is not None
        if self.last.fault is not None:
            raise self.last.fault
        return self.last.finish


class Asked(Protocol):
    """What takes requests: an engine, whichever."""

    def submit(self, prompt: Sequence[int], sampling: Sampling, sink: Sink) -> int:
        """Take a request."""


def ask(engine: Asked, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """Submit a request."""
    answer = Answer()
    engine.submit(prompt, sampling, answer.pieces.put)
    return answer


def greedy(count: int, **more: object) -> Sampling:
    """Sampling that takes the best token, that many times."""
    return Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def answers(engine: Asked, prompts: Iterable[Sequence[int]], sampling: Sampling) -> list[Answer]:
    """All at once, each to its end."""
    asked = [ask(engine, prompt, sampling) for prompt in prompts]
    return [answer.wait() for answer in asked]


Logits = Callable[[Sequence[int]], torch.Tensor]
"""The logits after each of these tokens, [tokens, vocab], from a trusted reference."""


def first_difference(logits: Logits, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """Where a greedy answer is not what those logits say; near ties may go either way, and end the comparison."""
    table = logits([*prompt, *tokens])
    for index, token in enumerate(tokens):
        row = table[len(prompt) + index - 1]
        best = row.topk(2)
        if int(best.indices[0]) == token:
            continue
        if float(best.values[0] - best.values[1]) < NEAR:
            return None
        return (
            f"token {index} is {token}, not {int(best.indices[0])}, by {float(best.values[0] - row[token])}"
        )
    return None


def penalised(logits: Logits, penalty: float) -> Logits:
    """The same after transformers' own repetition penalty, each row for the tokens up to it."""
    from transformers import RepetitionPenaltyLogitsProcessor

    def after(tokens: Sequence[int]) -> torch.Tensor:
        process = RepetitionPenaltyLogitsProcessor(penalty)
        table = logits(tokens)
        rows = [
            process(torch.tensor([list(tokens[: at + 1])]), table[at : at + 1].clone())
            for at in range(len(tokens))
        ]
        return torch.cat(rows)

    return after
