"""The fields of `config.json` and `generation_config.json` that are read, with the defaults that transformers gives them."""

from __future__ import annotations

import msgspec


class Rope(msgspec.Struct):
    """Rotary embedding: `rope_parameters` as transformers 5 writes it, or the older `rope_scaling`."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float = 1.0


class Config(msgspec.Struct):
    """`config.json`. Fields that are not listed are not read."""

    architectures: list[str]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    num_nextn_predict_layers: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None

    @property
    def slides(self) -> bool:
        """Whether a layer attends within a window."""
        return self.use_sliding_window or any(kind != "full_attention" for kind in self.layer_types or ())

    @property
    def experts(self) -> int:
        """How many experts a sparse layer has, under either name."""
        named = self.num_experts if self.num_experts is not None else self.num_local_experts
        return 128 if named is None else named

    def rope(self) -> Rope:
        """The rotary embedding's parameters, wherever they stand."""
        rope = self.rope_parameters or self.rope_scaling or Rope()
        return (
            rope if rope.rope_theta is not None else msgspec.structs.replace(rope, rope_theta=self.rope_theta)
        )


class Generation(msgspec.Struct):
    """`generation_config.json`."""

    eos_token_id: int | list[int] | None = None
