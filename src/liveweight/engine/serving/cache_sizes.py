"""Sizes that follow from a model and its settings: the context, and how many pages the cache has."""

from __future__ import annotations

from liveweight.engine.config import EngineConfig
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.errors import EngineConfigInvalid
from liveweight.spec.dtype import DType


def context_of(config: EngineConfig, spec: ModelSpec) -> int:
    """The tokens that a prompt and its answer may have together."""
    if config.context is None:
        return spec.max_positions
    if not 2 <= config.context <= spec.max_positions:
        raise EngineConfigInvalid(
            f"context {config.context} is not between 2 and the model's {spec.max_positions} positions"
        )
    return config.context


def page_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """One page on all ranks. Ranks beyond the model's kv heads keep copies of them."""
    dtype = DType(spec.dtype if config.dtype == "auto" else config.dtype)
    layers = spec.layers + (1 if config.draft and spec.draft_layers else 0)
    kv_heads = max(spec.kv_heads, config.tp)
    return 2 * layers * kv_heads * spec.head_dim * config.block_tokens * dtype.size_bytes


def cache_blocks(config: EngineConfig, spec: ModelSpec, context: int) -> int:
    """How many pages the cache has: what fits, but not more than could ever be in use or remembered at once."""
    fits = config.kv_bytes // page_bytes(config, spec)
    useful = 2 * config.max_running * -(-(context + 2) // config.block_tokens)
    if fits < 2:
        raise EngineConfigInvalid(
            f"kv_bytes {config.kv_bytes} holds {fits} pages of {page_bytes(config, spec)} bytes; at least 2 are needed"
        )
    return min(fits, useful)
