"""The models beside transformers on the same directory: logits, routing, shares of ranks; and what their parameters declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import Size
from liveweight.engine.models.declare import Declared
from liveweight.engine.models.forward import Group, Solo
from liveweight.engine.models.matmul import widened
from liveweight.engine.models.model import Model, build
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.engine.rank.checkpoint_loading import load
from liveweight.engine.rank.hooks import hooks_of
from liveweight.errors import EngineConfigInvalid
from liveweight.plan.digest_sums import DigestSums
from liveweight.worker.targets.torch_target import TensorTarget, module_target
from tests.support.engine.decoders import (
    DENSE,
    SPARSE,
    batch_of,
    causal,
    loaded,
    logits_of,
    on_ranks,
    relative,
    rewrite,
    stage,
    tensors_of,
    tokens_of,
)

CLOSE = 1e-4
KINDS = {
    f"{name}-{'tied' if tied else 'untied'}": (size, tied)
    for name, size in (("dense", DENSE), ("sparse", SPARSE))
    for tied in (True, False)
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Ranks are threads here: each has one of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by their arguments, each written once; not to be changed."""
    known: dict[object, Path] = {}

    def make(size: Size, **options: Any) -> Path:
        key = (size, *sorted(options.items()))
        if key not in known:
            known[key] = tmp_path_factory.mktemp("models") / "model"
            init_model(known[key], size, **options)
        return known[key]

    return make


def reference(directory: Path, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens.unsqueeze(0)).logits[0]
    return logits.float()


# Beside transformers.


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(made: Callable[..., Path], kind: str) -> None:
    size, tied = KINDS[kind]
    directory = made(size, tied=tied, seed=3)
    model = loaded(directory)
    for count in (1, 7, 40):
        tokens = tokens_of(count, seed=count)
        found = logits_of(model, tokens)
        assert found.dtype == torch.float32
        assert found.shape == (count, size.vocab)
        assert relative(found, reference(directory, tokens)) < CLOSE


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_have_the_logits_of_transformers(
    made: Callable[..., Path], kind: str, ranks: int
) -> None:
    size, tied = KINDS[kind]
    directory = made(size, tied=tied, seed=3)
    tokens = tokens_of(23)
    found = on_ranks(ranks, lambda group: logits_of(loaded(directory, group), tokens))
    assert all(torch.equal(found[0], other) for other in found)
    assert relative(found[0], reference(directory, tokens)) < CLOSE


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_model_with_every_option_is_that_of_transformers(tmp_path: Path, ranks: int) -> None:
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=64,
        vocab_size=97,
        attention_bias=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        rope_theta=5000.0,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    theirs = Qwen3MoeForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    tokens = tokens_of(19, vocab=97)
    found = on_ranks(ranks, lambda group: logits_of(loaded(tmp_path, group), tokens))
    assert relative(found[-1], reference(tmp_path, tokens)) < CLOSE


def test_a_plain_configuration_of_transformers_is_read(tmp_path: Path) -> None:
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48, vocab_size=64
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokens = tokens_of(9, vocab=64)
    assert relative(logits_of(loaded(tmp_path), tokens), reference(tmp_path, tokens)) < CLOSE


@pytest.mark.parametrize("ranks", [1, 4])
def test_routing_has_the_experts_that_transformers_chooses(made: Callable[..., Path], ranks: int) -> None:
    directory = made(SPARSE, seed=3)
    tokens = tokens_of(17)
    theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
    chosen: list[torch.Tensor] = []
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
    with torch.inference_mode():
        theirs(tokens.unsqueeze(0))

    def routing(group: Group) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        logits_of(loaded(directory, group), tokens, found)
        return found

    for found in on_ranks(ranks, routing):
        assert [one.dtype for one in found] == [torch.int64] * SPARSE.layers
        assert all(torch.equal(ours, hf) for ours, hf in zip(found, chosen, strict=True))


@pytest.mark.parametrize("size", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    made: Callable[..., Path], size: Size
) -> None:
    directory = made(size, seed=3)
    tokens = tokens_of(24)
    exact = reference(directory, tokens)
    ours = logits_of(loaded(directory, dtype=torch.bfloat16), tokens)
    theirs = reference(directory, tokens, torch.bfloat16)
    assert (ours - exact).square().mean() < 2 * (theirs - exact).square().mean() + 1e-4


def test_a_widened_product_is_rounded_once() -> None:
    x, weight = torch.randn(5, 300, dtype=torch.bfloat16), torch.randn(1000, 300, dtype=torch.bfloat16)
    exact = (x.double() @ weight.double().t()).to(torch.bfloat16)
    assert relative(widened(x, weight), exact) < 2**-8


# The draft layer.


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def plain_rotation(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        -1,
    )


def plain_feed(x: torch.Tensor, w: dict[str, torch.Tensor], size: Size) -> torch.Tensor:
    def mlp(rows: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = rows @ w[f"{name}.gate_proj.weight"].t(), rows @ w[f"{name}.up_proj.weight"].t()
        return (functional.silu(gate) * up) @ w[f"{name}.down_proj.weight"].t()

    if not size.experts:
        return mlp(x, "mlp")
    out = torch.zeros_like(x)
    for number, row in enumerate(x):
        scores = torch.softmax(w["mlp.gate.weight"] @ row, 0)
        best = scores.argsort(descending=True)[: size.experts_per_token]
        for expert in best.tolist():
            out[number] += mlp(row[None], f"mlp.experts.{expert}")[0] * scores[expert] / scores[best].sum()
    return out


def plain_draft(
    tensors: dict[str, torch.Tensor], size: Size, following: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """The MTP layer, straight from the checkpoint's tensors."""
    prefix = f"model.layers.{size.layers}."
    w = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    embedding = w.get("embed_tokens.weight", tensors["model.embed_tokens.weight"])
    both = (plain_norm(embedding[following], w["enorm.weight"]), plain_norm(hidden, w["hnorm.weight"]))
    x = torch.cat(both, -1) @ w["eh_proj.weight"].t()
    h = plain_norm(x, w["input_layernorm.weight"])
    q, k, v = ((h @ w[f"self_attn.{part}_proj.weight"].t()).view(len(h), -1, size.head_dim) for part in "qkv")
    q, k = (
        plain_rotation(plain_norm(part, w[f"self_attn.{name}_norm.weight"]), size.rope_theta)
        for part, name in ((q, "q"), (k, "k"))
    )
    x = x + causal(0, q, k, v) @ w["self_attn.o_proj.weight"].t()
    x = x + plain_feed(plain_norm(x, w["post_attention_layernorm.weight"]), w, size)
    return plain_norm(x, w["shared_head.norm.weight"])


def own_vocabulary(directory: Path, size: Size) -> None:
    """Give the MTP layer an embedding and a head of its own."""
    tensors = tensors_of(directory)
    for name in ("embed_tokens", "shared_head.head"):
        shape = tensors["model.embed_tokens.weight"].shape
        tensors[f"model.layers.{size.layers}.{name}.weight"] = torch.randn(shape)
    rewrite(directory, tensors)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_draft_is_what_its_tensors_say(tmp_path: Path, size: Size, own: bool, ranks: int) -> None:
    directory = tmp_path / "model"
    init_model(directory, size, mtp=True, tied=False, seed=4)
    if own:
        own_vocabulary(directory, size)
    tokens, following = tokens_of(15), tokens_of(15, seed=1)
    layers: list[int] = []

    def run(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = loaded(directory, group, draft=True)
        assert model.has_draft
        assert model.cached_layers == size.layers + 1
        with torch.inference_mode():
            hidden = model.hidden(batch_of(tokens))
            batch = noting(batch_of(following), layers)
            drafted = model.draft(batch, hidden)
            return hidden, drafted, model.draft_logits(drafted)

    tensors = tensors_of(directory)
    for hidden, drafted, logits in on_ranks(ranks, run):
        expected = plain_draft(tensors, size, following, hidden)
        head = tensors.get(f"model.layers.{size.layers}.shared_head.head.weight", tensors["lm_head.weight"])
        assert relative(drafted, expected) < CLOSE
        assert relative(logits, expected @ head.t()) < CLOSE
    assert layers == [size.layers] * ranks


def noting(batch: Any, layers: list[int]) -> Any:
    """The batch, noting which layers attend."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layers.append(layer)
        return causal(layer, q, k, v)

    return dataclasses.replace(batch, attend=attend)


def test_a_model_without_its_draft_says_so(made: Callable[..., Path]) -> None:
    model = loaded(made(DENSE, mtp=True), draft=False)
    assert not model.has_draft
    assert model.cached_layers == DENSE.layers
    with pytest.raises(EngineConfigInvalid, match="without its draft layer"):
        model.draft(batch_of(tokens_of(1)), torch.zeros(1, DENSE.hidden))


# What the ranks hold.


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_pieces_cover_every_tensor_of_the_checkpoint(
    tmp_path: Path, kind: str, own: bool, ranks: int
) -> None:
    size, tied = KINDS[kind]
    directory = tmp_path / "model"
    init_model(directory, size, mtp=True, tied=tied)
    if own:
        own_vocabulary(directory, size)

    def layout(group: Group) -> Any:
        model = loaded(directory, group, draft=True)
        return module_target(model, model.pieces()).layout

    digest_sums = DigestSums(on_ranks(ranks, layout))  # refuses what overlaps in part or is left to nobody
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(directory).items()}
    assert {spec.name: spec.shape for spec in digest_sums.expected} == expected
    aliases = {spec.name: spec.aliases for spec in digest_sums.expected if spec.aliases}
    assert aliases == ({"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {})


SHAPE = ModelSpec(
    architecture="Qwen3ForCausalLM", hidden=8, layers=1, heads=12, kv_heads=4, head_dim=4, intermediate=16, vocab=9
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "changed", "words"),
    [
        (5, {}, "tp 5 does not divide the heads of the model, 12"),
        (3, {}, "tp 3 does not divide the kv heads of the model, 4"),
        (6, {}, "tp 6 is no multiple of the model's kv heads, 4"),
        (4, {"intermediate": 6}, "tp 4 does not divide the intermediate size of the model, 6"),
        (1, {"draft_layers": 2}, "2 MTP layers"),
    ],
)
def test_a_group_that_cannot_share_the_model_is_refused(
    ranks: int, changed: dict[str, int], words: str
) -> None:
    class Many(Solo):
        """A rank of a group that nobody else joined."""

        size = ranks

    with pytest.raises(EngineConfigInvalid, match=words):
        build(
            msgspec.structs.replace(SHAPE, **changed), Many(), dtype=torch.float32, device="cpu", draft=True
        )


# Declarations outlast what happens to the tensors.


def transposed(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.transpose(-1, -2).contiguous().transpose(-1, -2)


def new_storage(module: Declared, name: str) -> None:
    parameter = getattr(module, name)
    parameter.data = transposed(parameter.data)


def new_parameter(module: Declared, name: str) -> None:
    fresh = nn.Parameter(torch.zeros_like(getattr(module, name)), requires_grad=False)
    setattr(module, name, fresh)


def new_transposed_parameter(module: Declared, name: str) -> None:
    setattr(module, name, nn.Parameter(transposed(getattr(module, name)), requires_grad=False))


CHANGES = {
    "storage": new_storage,
    "parameter": new_parameter,
    "transposed parameter": new_transposed_parameter,
}


def processed(model: Model, change: Callable[[Declared, str], None]) -> None:
    """Post-process every matrix."""
    for module in list(model.modules()):
        if isinstance(module, Declared):
            for name, declaration in list(module.declarations):
                if len(declaration.shape) > 1:
                    change(module, name)


def swap(model: Model, target: TensorTarget) -> None:
    """As a rank does it: what follows every change of weights follows this one."""
    target.swap()
    for hook in hooks_of(model):
        hook()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_declarations_outlast_post_processing(made: Callable[..., Path], kind: str, change: str) -> None:
    size, tied = KINDS[kind]
    first, second = (made(size, tied=tied, seed=seed) for seed in (3, 4))
    tokens = tokens_of(11)
    before, after = (logits_of(loaded(directory), tokens) for directory in (first, second))
    model = loaded(second)
    declared = model.declarations()
    processed(model, CHANGES[change])
    assert model.declarations() == declared
    load(model, first)
    assert relative(logits_of(model, tokens), before) < CLOSE
    target = module_target(model, model.pieces())
    stage(target, tensors_of(second))
    assert relative(logits_of(model, tokens), before) < CLOSE
    swap(model, target)
    assert relative(logits_of(model, tokens), after) < CLOSE
    swap(model, target)
    assert relative(logits_of(model, tokens), before) < CLOSE


def test_ranks_take_a_new_version_through_their_targets(made: Callable[..., Path]) -> None:
    first, second = (made(SPARSE, tied=True, seed=seed) for seed in (3, 4))
    tokens = tokens_of(11)

    def run(group: Group) -> torch.Tensor:
        model = loaded(first, group)
        target = module_target(model, model.pieces())
        stage(target, tensors_of(second))
        swap(model, target)
        return logits_of(model, tokens)

    for found in on_ranks(4, run):
        assert relative(found, reference(second, tokens)) < CLOSE
