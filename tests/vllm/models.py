"""Tiny checkpoints that vLLM serves on a CPU: random weights, dense or with experts, the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from liveweight.engine.init_model.tokenizer import write_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    """A dense one."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, num_hidden_layers=3, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def qwen3_moe(seed: int) -> Qwen3MoeForCausalLM:
    """One with experts."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(
        **SHAPE, **experts, num_hidden_layers=2, decoder_sparse_step=1, tie_word_embeddings=False
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def saved(model: Any, directory: Path) -> Path:
    """An HF checkpoint directory of it, with a tokenizer: vLLM returns no probabilities without one."""
    model.save_pretrained(directory)
    write_tokenizer(directory, SHAPE["vocab_size"])
    return directory
