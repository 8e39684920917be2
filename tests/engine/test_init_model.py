"""Checkpoints with random weights: the same bytes for the same seed, a tokenizer that loses nothing, and what transformers says."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.engine.init_model.tokenizer import SPECIALS, special_ids
from liveweight.engine.models.model_spec import ModelSpec
from liveweight.errors import EngineConfigInvalid
from tests.support.engine.decoders import DENSE, SPARSE, loaded, tensors_of
from tests.support.processes.cli import Cli

TINY = SIZES["qwen3"]["tiny"]


def files(directory: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    init_model(directory, TINY)
    return directory


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny / "tokenizer.json"))


@pytest.mark.parametrize("size", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, size: Any) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        init_model(tmp_path / name, size, mtp=True, seed=seed, shard_bytes=200_000)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a") != files(tmp_path / "c")


def test_a_draft_layer_leaves_the_other_weights_as_they_are(tmp_path: Path) -> None:
    init_model(tmp_path / "plain", DENSE)
    init_model(tmp_path / "mtp", DENSE, mtp=True)
    plain, mtp = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "mtp")
    assert all(torch.equal(tensor, mtp[name]) for name, tensor in plain.items())
    assert {name for name in mtp if name not in plain} >= {"model.layers.3.eh_proj.weight"}


@pytest.mark.parametrize("arch", SIZES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_it_and_misses_nothing(
    tmp_path: Path, arch: str, tied: bool, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    init_model(tmp_path / "model", SIZES[arch]["tiny"], tied=tied, dtype=dtype)
    logging.enable_propagation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
        words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert not any(report.values())
    logging.disable_propagation()
    assert caplog.records == []
    assert model.dtype == getattr(torch, dtype)
    assert model.config.tie_word_embeddings is tied
    assert len(words) == model.config.vocab_size
    assert words.eos_token_id in model.generation_config.eos_token_id


def test_its_sizes_are_about_what_their_names_say() -> None:
    wanted = {"tiny": (2e5, 2e6), "small": (2e7, 4e7), "1b": (1.0e9, 1.1e9)}
    for arch, sizes in SIZES.items():
        for name, size in sizes.items():
            least, most = wanted[name]
            assert least < parameters(size) < most, (arch, name)


def parameters(size: Any) -> int:
    """Counted from the sizes alone, tied."""
    attention = (2 * size.heads + 2 * size.kv_heads) * size.head_dim * size.hidden
    dense, sparse = size.intermediate, size.experts * size.expert_intermediate
    feed = 3 * size.hidden * (sparse if size.experts else dense)
    return int(size.vocab * size.hidden + size.layers * (attention + feed))


def test_the_random_model_is_not_dull(tiny: Path) -> None:
    """Its greedy text is neither one token nor a guess between near-equals."""
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    prompt = torch.arange(40, 52).unsqueeze(0)
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False)
    assert len(set(said[0, 12:].tolist())) > 12
    with torch.inference_mode():
        best = model(said).logits[0].topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.01


def test_the_engine_reads_what_was_written(tiny: Path) -> None:
    spec = ModelSpec.read(tiny)
    assert (spec.hidden, spec.layers, spec.vocab, spec.tied) == (TINY.hidden, TINY.layers, TINY.vocab, True)
    assert spec.eos_ids == (special_ids(TINY.vocab)["eos"], special_ids(TINY.vocab)["end"])
    weight = loaded(tiny).embedding.weight
    assert math.isclose(float(weight.std()), TINY.std, rel_tol=0.05)


# The tokenizer.


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abc the quick\n<|im_end|>é日")))
def test_transformers_tokenizes_alike(tiny: Path, tokenizer: Tokenizer, text: str) -> None:
    theirs = _theirs(tiny)
    ids = tokenizer.encode(text).ids
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == text


_known: dict[Path, Any] = {}


def _theirs(directory: Path) -> Any:
    if directory not in _known:
        _known[directory] = AutoTokenizer.from_pretrained(directory)
    return _known[directory]


@pytest.mark.parametrize("vocab", [260, 512, 8192])
def test_every_id_has_a_text_and_no_two_share_a_token(tmp_path: Path, vocab: int) -> None:
    from liveweight.engine.init_model.tokenizer import write_tokenizer

    write_tokenizer(tmp_path, vocab)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    assert len({tokenizer.id_to_token(number) for number in range(vocab)}) == vocab
    assert all(tokenizer.decode([number], skip_special_tokens=False) for number in range(vocab))
    ids = special_ids(vocab)
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [
        ids[name] for name in ("end", "start", "eos", "pad")
    ]


def test_a_chat_becomes_a_prompt(tiny: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hi\n"}]
    prompt = _theirs(tiny).apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n hi\n<|im_end|>\n<|im_start|>assistant\n"
    )


# All or nothing.


def test_a_directory_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("x")
    with pytest.raises(EngineConfigInvalid, match="is not an empty directory"):
        init_model(tmp_path / "model", DENSE)
    assert files(tmp_path / "model") == {"precious": b"x"}


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    init_model(tmp_path / "model", DENSE)
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("liveweight.engine.init_model.checkpoint.write_tokenizer", fail)
    with pytest.raises(EngineConfigInvalid, match=r"cannot be written: .*No space left"):
        init_model(tmp_path / "model", DENSE)
    assert list(tmp_path.iterdir()) == []


def test_files_are_as_readable_as_their_directory(tiny: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in tiny.iterdir()} == {tiny.stat().st_mode & 0o666}


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    import dataclasses

    with pytest.raises(EngineConfigInvalid, match="no room"):
        init_model(tmp_path / "model", dataclasses.replace(DENSE, vocab=259))


def test_the_command_writes_a_directory_and_refuses_to_write_it_again(tmp_path: Path, cli: Cli) -> None:
    options = ("--arch", "qwen3_moe", "--size", "tiny", "--mtp", "--seed", "5", "--untied")
    command = ("init-model", tmp_path / "model", *options, "--dtype", "bfloat16")
    first = cli.run(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3MoeForCausalLM"]
    assert fields["num_nextn_predict_layers"] == 1
    assert (fields["dtype"], fields["tie_word_embeddings"]) == ("bfloat16", False)
    again = cli.run(tmp_path, *command)
    assert again.returncode == 1
    assert again.stderr.startswith("LW-702")
    assert len(again.stderr.splitlines()) == 1
