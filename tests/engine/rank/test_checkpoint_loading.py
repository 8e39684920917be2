"""Start-up loading: from one file or shards, only what a rank holds; and checkpoints that cannot be served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from liveweight import checkpoint
from liveweight.checkpoint import INDEX, SINGLE
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.models.forward import Group
from liveweight.engine.models.model_spec import CONFIG, GENERATION, ModelSpec
from liveweight.engine.rank import checkpoint_loading
from liveweight.errors import CheckpointInvalid, LayoutInvalid
from tests.support.engine.decoders import (
    DENSE,
    SPARSE,
    loaded,
    logits_of,
    on_ranks,
    rewrite,
    tensors_of,
    tokens_of,
)

Change = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small dense checkpoint that a test may spoil."""
    init_model(tmp_path / "model", DENSE, tied=False, seed=1)
    return tmp_path / "model"


def config(**fields: object) -> Change:
    """Set fields of config.json; None takes one out."""

    def change(directory: Path) -> None:
        known = json.loads((directory / CONFIG).read_text()) | fields
        kept = {name: value for name, value in known.items() if value is not None}
        (directory / CONFIG).write_text(json.dumps(kept))

    return change


def content(file: str, data: bytes) -> Change:
    """Replace a file's bytes."""
    return lambda directory: (directory / file).write_bytes(data)


def without(file: str) -> Change:
    """Remove a file."""
    return lambda directory: (directory / file).unlink()


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Change the weights."""

    def rewritten(directory: Path) -> None:
        known = tensors_of(directory)
        change(known)
        rewrite(directory, known)

    return rewritten


def cut(directory: Path) -> None:
    """Lose the end of the weights."""
    with (directory / SINGLE).open("r+b") as file:
        file.truncate((directory / SINGLE).stat().st_size - 1000)


BROKEN: dict[str, tuple[Change, str]] = {
    "no configuration": (without(CONFIG), r"config.json does not exist"),
    "no JSON": (content(CONFIG, b"{"), r"config.json is not a model's configuration"),
    "JSON of another kind": (content(CONFIG, b"[]"), r"config.json is not a model's configuration"),
    "no weights": (without(SINGLE), rf"neither {SINGLE} nor {INDEX}"),
    "cut weights": (cut, rf"{SINGLE}: "),
    "empty weights": (content(SINGLE, b""), rf"{SINGLE}: "),
    "no weights but noise": (content(SINGLE, bytes(range(256)) * 9), rf"{SINGLE}: "),
    "index without shards": (
        lambda d: (d / SINGLE).rename(d / "x") and content(INDEX, b'{"weight_map": {"a": "b"}}')(d),
        "b: ",
    ),
    "unknown architecture": (
        config(architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM; supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM",
    ),
    "no architecture": (config(architectures=None), "architecture none; supported"),
    "a size missing": (config(hidden_size=None), "hidden_size"),
    "a size that is text": (config(hidden_size="64"), r"hidden_size"),
    "no layers": (config(num_hidden_layers=0), "layers is 0"),
    "a negative size": (config(intermediate_size=-4), "intermediate is -4"),
    "odd heads": (config(num_key_value_heads=3), "4 heads are no multiple of 3"),
    "odd head size": (config(head_dim=15), "head_dim 15 is odd"),
    "no kv heads": (config(num_key_value_heads=0), "kv_heads is 0"),
    "sliding window": (config(use_sliding_window=True), "sliding-window"),
    "a sliding layer": (config(layer_types=["full_attention", "sliding_attention"]), "sliding-window"),
    "scaled rope": (config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope type yarn"),
    "scaled rope, as transformers 5": (
        config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        "rope type linear",
    ),
    "other activation": (config(hidden_act="gelu"), "hidden_act gelu"),
    "quantised": (config(quantization_config={"bits": 4}), "quantised"),
    "unknown dtype": (config(dtype="int8"), "dtype int8 is none of"),
    "eos outside": (content(GENERATION, b'{"eos_token_id": 9999}'), r"eos_token_id \[9999\] is outside"),
    "a tensor missing": (tensors(lambda t: t.pop("model.norm.weight")), "model.norm.weight missing"),
    "a tensor too many": (tensors(lambda t: t.update(x=torch.ones(1))), "x unexpected"),
    "a layer too many": (
        tensors(lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)})),
        "model.layers.9.mlp.up_proj.weight unexpected",
    ),
    "a wrong shape": (
        tensors(lambda t: t.update({"model.norm.weight": torch.ones(47)})),
        r"model.norm.weight has shape \[47\], not \[48\]",
    ),
    "a dtype that is none of ours": (
        tensors(lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})),
        "model.norm.weight is int8",
    ),
    "another size announced": (config(vocab_size=600), r"model.embed_tokens.weight has shape \[515, 48\]"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(directory: Path, fault: str) -> None:
    change, words = BROKEN[fault]
    change(directory)
    with pytest.raises(CheckpointInvalid, match=words) as refused:
        loaded(directory)
    assert "\n" not in str(refused.value)
    assert str(directory) in str(refused.value)


def test_every_problem_of_a_checkpoint_is_said_at_once(directory: Path) -> None:
    tensors(lambda t: (t.pop("model.norm.weight"), t.update(x=torch.ones(1))))(directory)
    with pytest.raises(CheckpointInvalid, match=r"model.norm.weight missing, x unexpected"):
        loaded(directory)


def test_nothing_is_written_before_all_fits(directory: Path) -> None:
    model = loaded(directory)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    tensors(lambda t: (t.pop("model.norm.weight"), [one.zero_() for one in t.values()]))(directory)
    with pytest.raises(CheckpointInvalid):
        checkpoint_loading.load(model, directory)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_parameter_of_another_shape_than_declared_is_refused(directory: Path) -> None:
    model = loaded(directory)
    model.norm.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(LayoutInvalid, match=r"norm.weight has shape \(3,\)"):
        checkpoint_loading.load(model, directory)


# What is fine.


@pytest.mark.parametrize("size", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_shards_load_as_one_file_does(tmp_path: Path, size: Any) -> None:
    init_model(tmp_path / "one", size, seed=2)
    init_model(tmp_path / "many", size, seed=2, shard_bytes=100_000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    one, many = (dict(loaded(tmp_path / name).named_parameters()) for name in ("one", "many"))
    assert all(torch.equal(tensor, many[name]) for name, tensor in one.items())


def test_weights_are_cast_to_the_dtype_of_the_engine(directory: Path) -> None:
    model = loaded(directory, dtype=torch.bfloat16)
    weight = dict(model.named_parameters())["layers.0.attention.out.weight"]
    stored = tensors_of(directory)["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(weight, stored.to(torch.bfloat16))


def test_a_head_beside_tied_embeddings_is_not_read(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    init_model(directory, DENSE, tied=True)
    expected = logits_of(loaded(directory), tokens_of(5))
    tensors(lambda t: t.update({"lm_head.weight": torch.zeros(515, 48)}))(directory)
    assert torch.equal(logits_of(loaded(directory), tokens_of(5)), expected)


def test_tied_embeddings_load_under_either_name(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    init_model(directory, DENSE, tied=True)
    expected = logits_of(loaded(directory), tokens_of(5))
    tensors(lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))(directory)
    assert torch.equal(logits_of(loaded(directory), tokens_of(5)), expected)


def test_a_draft_layer_is_passed_over_where_none_is_wanted(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    init_model(directory, DENSE, mtp=True)
    assert loaded(directory, draft=True).has_draft
    assert not loaded(directory, draft=False).has_draft
    config(num_nextn_predict_layers=None)(directory)
    assert not loaded(directory, draft=True).has_draft


def test_a_draft_layer_that_is_only_announced_is_none(directory: Path) -> None:
    config(num_nextn_predict_layers=1)(directory)
    assert not loaded(directory, draft=True).has_draft


def test_a_draft_layer_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    init_model(directory, DENSE, mtp=True)
    tensors(lambda t: t.pop("model.layers.3.eh_proj.weight"))(directory)
    with pytest.raises(CheckpointInvalid, match=r"model.layers.3.eh_proj.weight missing"):
        loaded(directory, draft=True)


def test_generation_ends_where_the_generation_config_says(directory: Path) -> None:
    assert ModelSpec.read(directory).eos_ids == (513, 511)
    (directory / GENERATION).unlink()
    assert ModelSpec.read(directory).eos_ids == (513,)
    config(eos_token_id=[1, 2, 1])(directory)
    assert ModelSpec.read(directory).eos_ids == (1, 2)


def test_the_rotation_is_read_in_old_and_new_spelling(directory: Path) -> None:
    config(rope_theta=1234.0)(directory)
    assert ModelSpec.read(directory).rope_theta == 1234.0
    config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 4321.0})(directory)
    assert ModelSpec.read(directory).rope_theta == 4321.0


def test_a_rank_reads_only_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    init_model(directory, SPARSE, tied=False)
    read: dict[int, int] = {}
    opened = checkpoint.opened

    class Counting:
        def __init__(self, part: Any, rank: int) -> None:
            self.part, self.rank = part, rank

        def __getitem__(self, index: Any) -> torch.Tensor:
            found: torch.Tensor = self.part[index]
            read[self.rank] = read.get(self.rank, 0) + found.numel()
            return found

    def run(group: Group) -> int:
        class File:
            def __init__(self, file: Any) -> None:
                self.file = file

            def get_slice(self, name: str) -> Counting:
                return Counting(self.file.get_slice(name), group.rank)

        @contextmanager
        def counted(path: Path) -> Iterator[Any]:
            with opened(path) as file:
                yield File(file)

        with monkeypatch.context() as patched:
            patched.setattr(checkpoint_loading, "opened", counted)
            model = loaded(directory, group)
        return sum(parameter.numel() for parameter in model.parameters())

    whole = sum(tensor.numel() for tensor in tensors_of(directory).values())
    held = [run(Alone(rank)) for rank in range(4)]
    assert max(held) < whole / 2
    assert all(read[rank] <= held[rank] for rank in range(4))


class Alone:
    """One of four ranks, for what needs no other."""

    size = 4

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """Its own part."""
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Its own part."""
        return part


def test_padding_of_the_vocabulary_is_zero(directory: Path) -> None:
    last = on_ranks(4, lambda group: loaded(directory, group).embedding.weight)[3]
    assert last.shape == (129, 48)
    assert torch.count_nonzero(last[-1]) == 0
    assert torch.count_nonzero(last[-2]) > 0
