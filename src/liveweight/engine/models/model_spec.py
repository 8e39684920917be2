"""What a model is, read from a checkpoint directory's `config.json` and `generation_config.json`. No torch, no weights.

Owns the names of the configuration's fields and what is refused. Which tensors follow from it is the layers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from liveweight.checkpoint import tensor_names
from liveweight.engine.models.hf_config import Config, Generation, Rope
from liveweight.errors import CheckpointInvalid, ManifestInvalid
from liveweight.spec.decoders import from_json

CONFIG = "config.json"
GENERATION = "generation_config.json"
DENSE = "Qwen3ForCausalLM"
SPARSE = "Qwen3MoeForCausalLM"
ARCHITECTURES = (DENSE, SPARSE)
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_THETA = 10_000.0
DENSE_HEAD_DIM = 128
DRAFT = "draft"
"""What rounds call the group of the MTP layer's tensors."""
_T = TypeVar("_T")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder's sizes and habits. `experts` 0 is a dense model; `draft_layers` counts the MTP layers that the checkpoint has.

    `draft_embedding` and `draft_head`: the MTP layer has an own copy, and does not share the main model's.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float = 1e-6
    rope_theta: float = DEFAULT_THETA
    tied: bool = False
    attention_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    norm_topk: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    draft_layers: int = 0
    draft_embedding: bool = False
    draft_head: bool = False
    dtype: str = "float32"
    max_positions: int = 32768
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        for rule, holds in _rules(self).items():
            if not holds:
                raise CheckpointInvalid(f"{CONFIG}: {rule}")

    @classmethod
    def read(cls, directory: Path, *, weights: bool = True) -> ModelSpec:
        """From a checkpoint directory; CheckpointInvalid, in one line, for what is missing, unknown or makes no sense.

        Which MTP layers there are is looked up in the weights' headers, unless there are no `weights` yet.
        """
        path = directory / CONFIG
        config = _config(path)
        try:
            drafts = _drafts(directory, config) if weights else (0, False, False)
            return _spec(config, _eos(directory, config), drafts)
        except CheckpointInvalid as error:
            raise CheckpointInvalid(f"{directory}: {error}") from error

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts; the draft layer is number `layers`."""
        return self.experts > 0 and layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0

    @property
    def sparse_layers(self) -> int:
        """How many of the main model's layers have experts."""
        return sum(map(self.sparse, range(self.layers)))


def _rules(spec: ModelSpec) -> dict[str, bool]:
    sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions")
    rules = {f"{name} is {getattr(spec, name)}, not positive": getattr(spec, name) > 0 for name in sizes}
    rules |= {
        f"head_dim {spec.head_dim} is odd": spec.head_dim % 2 == 0,
        f"{spec.heads} heads are no multiple of {spec.kv_heads} kv heads": spec.kv_heads > 0
        and spec.heads % spec.kv_heads == 0,
        f"dtype {spec.dtype} is none of {', '.join(DTYPES)}": spec.dtype in DTYPES,
        f"num_experts is {spec.experts}": spec.experts > 0 or spec.architecture != SPARSE,
        f"{spec.experts_per_token} of {spec.experts} experts per token": spec.experts == 0
        or 0 < spec.experts_per_token <= spec.experts,
        f"moe_intermediate_size is {spec.expert_intermediate}": spec.experts == 0
        or spec.expert_intermediate > 0,
        f"decoder_sparse_step is {spec.sparse_step}": spec.sparse_step > 0,
        f"num_nextn_predict_layers is {spec.draft_layers}": spec.draft_layers >= 0,
        f"rope_theta is {spec.rope_theta}": spec.rope_theta > 0,
        f"rms_norm_eps is {spec.eps}": spec.eps > 0,
        f"eos_token_id {list(spec.eos_ids)} is outside the vocabulary of {spec.vocab}": all(
            0 <= token < spec.vocab for token in spec.eos_ids
        ),
    }
    return rules


def _config(path: Path) -> Config:
    _check_architecture(path)
    config = _decoded(path, Config)
    refused = {
        f"hidden_act {config.hidden_act}; silu is supported": config.hidden_act not in ("silu", "swish"),
        "sliding-window attention is not supported": config.slides,
        "quantised weights are not supported": config.quantization_config is not None,
    }
    for reason, holds in refused.items():
        if holds:
            raise CheckpointInvalid(f"{path}: {reason}")
    return config


def _check_architecture(path: Path) -> None:
    """Before all else: the other fields of an unknown architecture mean nothing."""
    named = _decoded(path, dict[str, object]).get("architectures")
    known = isinstance(named, list) and len(named) == 1 and named[0] in ARCHITECTURES
    if not known:
        shown = ", ".join(map(str, named)) if isinstance(named, list) and named else "none"
        raise CheckpointInvalid(f"{path}: architecture {shown}; supported: {', '.join(ARCHITECTURES)}")


def _decoded(path: Path, kind: type[_T]) -> _T:
    try:
        return from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        raise CheckpointInvalid(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{path} is not a model's configuration: {error}") from error


def _eos(directory: Path, config: Config) -> tuple[int, ...]:
    """Where generation ends: as generation_config.json says, else as config.json says."""
    path = directory / GENERATION
    ids = _decoded(path, Generation).eos_token_id if path.is_file() else None
    ids = config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(dict.fromkeys(ids))


def _drafts(directory: Path, config: Config) -> tuple[int, bool, bool]:
    """The MTP layers that are there (none, where the configuration announces what the files lack), and what the first one owns."""
    if not config.num_nextn_predict_layers:
        return 0, False, False
    prefix = f"model.layers.{config.num_hidden_layers}."
    try:
        names = {name for name in tensor_names(directory) if name.startswith(prefix)}
    except ManifestInvalid as error:
        raise CheckpointInvalid(" ".join(str(error).split())) from error
    if not names:
        return 0, False, False
    own = (f"{prefix}embed_tokens.weight" in names, f"{prefix}shared_head.head.weight" in names)
    return config.num_nextn_predict_layers, *own


def _spec(config: Config, eos_ids: tuple[int, ...], drafts: tuple[int, bool, bool]) -> ModelSpec:
    sparse = config.architectures == [SPARSE]
    head_dim = config.head_dim
    if head_dim is None:
        head_dim = config.hidden_size // max(1, config.num_attention_heads) if sparse else DENSE_HEAD_DIM
    return ModelSpec(
        architecture=config.architectures[0],
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads
        if config.num_key_value_heads is None
        else config.num_key_value_heads,
        head_dim=head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        rope_theta=_theta(config.rope()),
        tied=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        experts=config.experts if sparse else 0,
        experts_per_token=config.num_experts_per_tok if sparse else 0,
        expert_intermediate=config.moe_intermediate_size if sparse else 0,
        norm_topk=config.norm_topk_prob,
        sparse_step=config.decoder_sparse_step,
        dense_layers=tuple(config.mlp_only_layers or ()),
        draft_layers=drafts[0],
        draft_embedding=drafts[1],
        draft_head=drafts[2],
        dtype=(config.dtype or config.torch_dtype or "float32").removeprefix("torch."),
        max_positions=config.max_position_embeddings,
        eos_ids=eos_ids,
        bos_id=config.bos_token_id,
    )


def _theta(rope: Rope) -> float:
    kind = rope.rope_type or rope.type or "default"
    if kind != "default" or rope.partial_rotary_factor != 1.0:
        what = f"type {kind}" if kind != "default" else "on a part of a head"
        raise CheckpointInvalid(f"{CONFIG}: rope {what} is not supported, only default")
    return DEFAULT_THETA if rope.rope_theta is None else rope.rope_theta
