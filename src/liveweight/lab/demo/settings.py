"""The settings of a demo run: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from liveweight.engine.init_model.sizes import SIZES, VLLM_TINY, Size
from liveweight.lab.demo.learning.task import SortDigits
from liveweight.wire.messages.values import KvPolicy

EngineKind: TypeAlias = Literal["embedded", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The trainer's hyperparameters, found by trial, so that every seed learns."""

    warmup_steps: int = 120
    warmup_batch: int = 128
    warmup_rate: float = 2e-3
    rate: float = 7e-4
    rate_end: float = 0.2
    """The share of `rate` that is left at the end. The rate falls linearly."""
    prompts: int = 32
    group: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    gradient_norm: float = 1.0
    checked: int = 32
    """Samples of a step whose logprobs are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One demo. `staleness` is how many versions a sample may lie behind the weights that learn from it."""

    engine: EngineKind = "embedded"
    mode: str = "ipc"
    replicas: int = 1
    tp: int = 2
    steps: int = 100
    kv_policy: KvPolicy = "recompute"
    staleness: int = 2
    seed: int = 0
    chaos: bool = False
    control: bool = True
    task: SortDigits = field(default_factory=SortDigits)
    training: Training = field(default_factory=Training)

    @property
    def engines(self) -> str:
        """The engines, as text for the user."""
        kind = "vllm serve" if self.engine == "vllm" else f"liveweight serve, {self.tp} ranks each"
        return f"{self.replicas} x {kind}"

    @property
    def size(self) -> Size:
        """The model's."""
        return VLLM_TINY if self.engine == "vllm" else SIZES["qwen3"]["tiny"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
    """How to start an engine: the program, to which its arguments are added, and its environment variables."""

    program: tuple[str, ...]
    environment: Mapping[str, str]
