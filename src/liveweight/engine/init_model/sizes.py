"""The sizes on offer, and the `config.json` that a size becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from liveweight.engine.models.model_spec import DENSE, SPARSE

Architecture: TypeAlias = Literal["qwen3", "qwen3_moe"]
Dtype: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A decoder's sizes; `experts` 0 is a dense one."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    rope_theta: float = 1_000_000.0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @property
    def std(self) -> float:
        """Of the random weights: such that a layer's output is about as large as its input, whatever the size."""
        return max(0.02, float(self.hidden**-0.5))


SIZES: dict[str, dict[str, Size]] = {
    "qwen3": {
        "tiny": Size(
            hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=256, vocab=512, max_positions=2048
        ),
        "small": Size(
            hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=8192, max_positions=4096
        ),
        "1b": Size(
            hidden=2048, layers=20, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocab=32768, max_positions=8192
        ),
    },
    "qwen3_moe": {
        "tiny": Size(
            hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=256, vocab=512, max_positions=2048,
            experts=8, experts_per_token=2, expert_intermediate=64,
        ),
        "small": Size(
            hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=8192, max_positions=4096,
            experts=16, experts_per_token=4, expert_intermediate=128,
        ),
        "1b": Size(
            hidden=1024, layers=18, heads=16, kv_heads=4, head_dim=128, intermediate=3072, vocab=32768, max_positions=8192,
            experts=32, experts_per_token=4, expert_intermediate=512,
        ),
    },
}  # fmt: skip
VLLM_TINY = replace(SIZES["qwen3"]["tiny"], head_dim=32)
"""vLLM's attention on CPUs wants larger heads."""


def config(size: Size, *, tied: bool, mtp: bool, dtype: Dtype, ids: dict[str, int]) -> dict[str, object]:
    """The directory's `config.json`; `ids` are the tokenizer's special tokens."""
    fields: dict[str, object] = {
        "architectures": [SPARSE if size.experts else DENSE],
        "model_type": "qwen3_moe" if size.experts else "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "dtype": dtype,
        "eos_token_id": ids["eos"],
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": size.std,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.max_positions,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "pad_token_id": ids["pad"],
        "rms_norm_eps": 1e-6,
        "rope_theta": size.rope_theta,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": size.vocab,
    }
    if size.experts:
        fields |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": size.expert_intermediate,
            "norm_topk_prob": True,
            "num_experts": size.experts,
            "num_experts_per_tok": size.experts_per_token,
        }
    if mtp:
        fields["num_nextn_predict_layers"] = 1
    return fields
