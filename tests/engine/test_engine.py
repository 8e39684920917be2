"""The engine beside HF transformers, and beside itself in other company. Real ranks."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.serving.requests import Sampling
from liveweight.errors import (
    CheckpointInvalid,
    EngineConfigInvalid,
    EngineStopping,
    LiveWeightError,
    RankLost,
    RequestInvalid,
)
from tests.support.engine.engines import (
    WITHIN_S,
    Answer,
    Arch,
    Logits,
    Models,
    answers,
    ask,
    first_difference,
    forking,
    greedy,
    penalised,
)
from tests.support.processes.fork_server import Zygote
from tests.support.processes.stopping import stop

Start = Callable[..., Engine]


@pytest.fixture
def start(zygote: Zygote) -> Iterator[Start]:
    """Starts engines that end with the test."""
    with ExitStack() as stack:

        def start(model: Path, **settings: Any) -> Engine:
            config = EngineConfig(model=str(model), threads=1, **settings)
            return stack.enter_context(Engine(config, launch=forking(zygote)))

        yield start


def some_prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(4, 500) for _ in range(chance.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    start: Start,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    arch: Arch,
    tied: bool,
    tp: int,
) -> None:
    directory = models.directory(arch, tied=tied)
    engine, logits = start(directory, tp=tp), transformers_logits(directory)
    prompts = some_prompts(20)
    for prompt, answer in zip(prompts, answers(engine, prompts, greedy(64, logprobs=3)), strict=True):
        assert answer.finish == "length"
        assert len(answer.ids) == 64
        assert first_difference(logits, prompt, answer.ids) is None
        table = logits([*prompt, *answer.ids])[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token in zip(table, answer.tokens, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            for other, logprob in token.top:
                assert logprob == pytest.approx(float(row[other]), abs=1e-3)


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "two ranks": {"tp": 2},
    "one step at a time": {"overlap": False},
    "in small chunks": {"batch_tokens": 8, "max_running": 4},
    "without a prefix cache": {"prefix_cache": False},
    "with pages that run out": {"kv_bytes": 2 * 4 * 2 * 16 * 16 * 4 * 14, "max_running": 16},
    "with pages of one token": {"block_tokens": 1},
    "without its draft": {"draft": False},
}


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_request_gets_the_same_tokens_in_whatever_company(
    start: Start, models: Models, transformers_logits: Callable[[Path], Logits], how: str, mtp: bool
) -> None:
    directory = models.directory(mtp=mtp)
    engine, logits = start(directory, **WAYS[how]), transformers_logits(models.directory())
    prompts = some_prompts(8, longest=60, seed=1)
    alone = answers(engine, prompts[:1], greedy(24))
    crowd = answers(engine, prompts, greedy(24))
    again = answers(engine, prompts, greedy(24))
    for prompt, answer in zip([*prompts[:1], *prompts, *prompts], [*alone, *crowd, *again], strict=True):
        assert answer.finish == "length"
        assert first_difference(logits, prompt, answer.ids) is None
    if how not in ("without a prefix cache", "with pages that run out"):
        size = engine.config.block_tokens
        cached = [answer.last.cached_tokens for answer in again if answer.last is not None]
        assert cached == [(len(prompt) - 1) // size * size for prompt in prompts]
    if how == "with pages that run out":
        assert engine.status().counts.preemptions > 0
    status = engine.status()
    assert (status.running, status.waiting, status.blocks_free) == (0, 0, status.blocks_total)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_repetition_penalty_is_over_all_tokens_in_whatever_company(
    start: Start, models: Models, transformers_logits: Callable[[Path], Logits], how: str, mtp: bool
) -> None:
    engine = start(models.directory(mtp=mtp), **WAYS[how])
    logits = transformers_logits(models.directory())
    prompts = some_prompts(8, longest=60, seed=1)
    sampling = greedy(24, repetition_penalty=1.6)
    asked = [ask(engine, prompt, sampling) for prompt in prompts]
    beside = [ask(engine, prompt, greedy(24)) for prompt in prompts]
    again = answers(engine, prompts, sampling)  # pages of the prompts are in the prefix cache now
    for prompt, answer in zip([*prompts, *prompts], [*asked, *again], strict=True):
        assert answer.wait().finish == "length"
        assert first_difference(penalised(logits, 1.6), prompt, answer.ids) is None
    for prompt, answer in zip(prompts, beside, strict=True):
        assert first_difference(logits, prompt, answer.wait().ids) is None
    assert [answer.ids for answer in asked] != [answer.ids for answer in beside]
    assert (engine.status().counts.preemptions > 0) == (how == "with pages that run out")


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_token_after_an_accepted_draft_has_seen_it(
    start: Start,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    tmp_path: Path,
    penalty: float,
) -> None:
    directory = with_good_draft(models.directory(mtp=True, tied=False), tmp_path / "good")
    engine, logits = start(directory), penalised(transformers_logits(directory), penalty)
    sampling = greedy(24, repetition_penalty=penalty, logprobs=0, logprobs_mode="processed_logprobs")
    prompts = some_prompts(8, seed=3)
    for prompt, answer in zip(prompts, answers(engine, prompts, sampling), strict=True):
        assert first_difference(logits, prompt, answer.ids) is None
        table = logits([*prompt, *answer.ids])[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token in zip(table, answer.tokens, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
    assert engine.status().counts.accepted_tokens > 0


def test_a_seed_gives_the_same_tokens_in_whatever_company(start: Start, models: Models) -> None:
    prompts = some_prompts(6, seed=2)
    hows = [
        Sampling(
            max_tokens=20,
            temperature=1.0,
            seed=number,
            top_p=0.9 if number % 2 else 1.0,
            min_p=0.02 if number % 3 == 0 else 0.0,
            repetition_penalty=1.4 if number > 2 else 1.0,
            ignore_eos=True,
        )
        for number in range(6)
    ]
    seen = []
    for settings in ({"tp": 2}, {"overlap": False}, {"draft": False}):
        engine = start(models.directory(mtp=True), **settings)
        together = [ask(engine, prompt, how) for prompt, how in zip(prompts, hows, strict=True)]
        seen.append([answer.wait().ids for answer in together])
        seen.append([ask(engine, p, how).wait().ids for p, how in zip(prompts, hows, strict=True)])
    assert all(tokens == seen[0] for tokens in seen)
    assert len({tuple(tokens) for tokens in seen[0]}) == len(prompts)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_good_draft_is_taken_more_than_half_of_the_time_and_changes_no_token(
    start: Start, models: Models, tmp_path: Path, tp: int
) -> None:
    directory = with_good_draft(models.directory(mtp=True), tmp_path / "good")
    prompts = some_prompts(8, seed=3)
    drafting, plain = start(directory, tp=tp), start(directory, tp=tp, draft=False)
    expected = [answer.ids for answer in answers(plain, prompts, greedy(32))]
    assert [answer.ids for answer in answers(drafting, prompts, greedy(32))] == expected
    counts = drafting.status().counts
    assert counts.accepted_tokens > counts.drafted_tokens / 2
    assert counts.steps < plain.status().counts.steps * 0.75
    assert plain.status().counts.drafted_tokens == 0


@pytest.mark.parametrize("draft", [False, True])
def test_an_engine_set_to_processed_logprobs_reports_them_also_of_accepted_drafts(
    start: Start,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    tmp_path: Path,
    draft: bool,
) -> None:
    directory = with_good_draft(models.directory(mtp=True), tmp_path / "good")
    logits = transformers_logits(directory)
    engine = start(directory, logprobs_mode="processed_logprobs", draft=draft)
    sampling = Sampling(max_tokens=40, temperature=0.3, top_k=2, seed=8, ignore_eos=True, logprobs=4)
    raw = msgspec.structs.replace(sampling, logprobs_mode="raw_logprobs")
    prompts = some_prompts(6, seed=4)
    for how, heat, kept in ((sampling, 0.3, 2), (raw, 1.0, 4)):
        for prompt, answer in zip(prompts, answers(engine, prompts, how), strict=True):
            table = logits([*prompt, *answer.ids])[len(prompt) - 1 : -1] / heat
            for row, token in zip(table, answer.tokens, strict=True):
                norm = float((row.topk(2).values if kept == 2 else row).logsumexp(-1))
                assert token.logprob == pytest.approx(float(row[token.id]) - norm, abs=1e-3)
                assert len(token.top) == kept
                for other, logprob in token.top:
                    assert logprob == pytest.approx(float(row[other]) - norm, abs=1e-3)
    assert (engine.status().counts.accepted_tokens > 0) == draft


def with_good_draft(original: Path, directory: Path) -> Path:
    """A model whose layers say little, so that the next token follows mostly from the last one, which its draft layer passes on."""
    shutil.copytree(original, directory)
    tensors = load_file(directory / "model.safetensors")
    draft = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.0 if f".layers.{draft}." in name else 0.05)
    width = tensors[f"model.layers.{draft}.eh_proj.weight"].shape[0]
    tensors[f"model.layers.{draft}.eh_proj.weight"] = torch.cat(
        [torch.eye(width), torch.zeros(width, width)], 1
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("settings", [{"tp": 2}, {"batch_tokens": 8, "max_running": 4}], ids=str)
def test_the_experts_of_every_token_are_recorded(
    start: Start, models: Models, settings: dict[str, Any]
) -> None:
    directory = models.directory("qwen3_moe")
    engine = start(directory, **settings)
    prompts = some_prompts(4, seed=4)
    prompts.append(prompts[0])  # a prefix that is in the cache must not leave its experts out
    spec = engine.spec
    for prompt, answer in zip(prompts, answers(engine, prompts, greedy(12, routing=True)), strict=True):
        assert answer.last is not None
        assert answer.last.routing is not None
        shape = (len(prompt) + 11, spec.sparse_layers, spec.experts_per_token)
        recorded = np.frombuffer(answer.last.routing, dtype="<u2").reshape(shape)
        assert np.array_equal(
            np.sort(recorded, -1), np.sort(experts_of(directory, [*prompt, *answer.ids[:-1]]), -1)
        )


def experts_of(directory: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The experts that HF's own router chooses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        routers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [
        router.view(len(tokens), -1).topk(model.config.num_experts_per_tok).indices for router in routers
    ]
    return torch.stack(chosen, dim=1).numpy()


def test_half_precision_is_served_as_it_is(
    start: Start, models: Models, transformers_logits: Callable[[Path], Logits]
) -> None:
    directory = models.directory(dtype="bfloat16")
    engine, logits = start(directory, tp=2), transformers_logits(directory)
    prompts = some_prompts(4, seed=5)
    for prompt, answer in zip(prompts, answers(engine, prompts, greedy(16, logprobs=0)), strict=True):
        table = logits([*prompt, *answer.ids])[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(table, answer.ids, strict=True)]
        assert [token.logprob for token in answer.tokens] == pytest.approx(wanted, abs=0.1)


def test_a_request_ends_at_a_stop_string_a_stop_token_or_its_end(start: Start, models: Models) -> None:
    engine = start(models.directory())
    prompt = some_prompts(1, seed=6)[0]
    whole = ask(engine, prompt, greedy(24)).wait()
    middle = engine.tokenizer.decode(whole.ids[8:10])
    by_string = ask(engine, prompt, greedy(24, stop=(middle,))).wait()
    assert by_string.finish == "stop"
    assert by_string.text == whole.text[: whole.text.index(middle)]
    by_token = ask(engine, prompt, greedy(24, stop_token_ids=(whole.ids[5],))).wait()
    assert by_token.finish == "stop"
    assert by_token.ids == whole.ids[: whole.ids.index(whole.ids[5]) + 1]
    assert whole.finish == "length"


def test_a_cancelled_request_ends_with_what_it_has_and_gives_its_pages_back(
    start: Start, models: Models
) -> None:
    engine = start(models.directory())
    numbers = []
    asked = []
    for prompt in some_prompts(6, seed=7):
        answer = Answer()
        numbers.append(engine.submit(prompt, greedy(1000), answer.pieces.put))
        asked.append(answer)
    for answer, number in zip(asked, numbers, strict=True):
        answer.piece()
        engine.cancel(number)
        engine.cancel(number)
    assert [answer.wait().finish for answer in asked] == ["abort"] * 6
    assert all(0 < len(answer.ids) < 1000 for answer in asked)
    status = engine.status()
    assert (status.running, status.blocks_free) == (0, status.blocks_total)


def test_an_engine_that_stops_lets_requests_finish_and_takes_no_more(start: Start, models: Models) -> None:
    engine = start(models.directory())
    answer = ask(engine, [5, 6], greedy(300))
    answer.piece()
    stopping = threading.Thread(target=engine.stop, args=(WITHIN_S,))
    stopping.start()
    while engine.status().state == "running":
        answer.piece()
    with pytest.raises(EngineStopping):
        ask(engine, [5], greedy(4))
    assert answer.wait().finish == "length"
    stopping.join()
    assert engine.status().state == "stopped"


def test_requests_that_do_not_finish_before_the_engine_stops_are_answered(
    start: Start, models: Models
) -> None:
    engine = start(models.directory(), tp=2)
    answer, pids = ask(engine, [5, 6], greedy(2000)), engine.pids
    answer.piece()
    engine.stop(timeout_s=0.0)
    assert answer.wait().finish == "abort"
    assert 0 < len(answer.ids) < 2000
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_every_request_with_an_error_that_names_it(models: Models, victim: int) -> None:
    config = EngineConfig(model=str(models.directory()), tp=2, threads=1, max_running=2)
    with Engine(config) as engine:
        lost: queue.Queue[LiveWeightError] = queue.Queue()
        engine.on_failure(lost.put)
        asked = [ask(engine, [5, 6, 7], greedy(2000)) for _ in range(5)]
        asked[0].piece()
        os.kill(engine.pids[victim], signal.SIGKILL)
        fault = lost.get(timeout=WITHIN_S)
        assert isinstance(fault, RankLost)
        assert f"rank {victim}" in str(fault)
        for answer in asked:
            with pytest.raises(RankLost, match=f"rank {victim}"):
                assert answer.wait().finish
        with pytest.raises(RankLost):
            ask(engine, [5], greedy(4))
        assert engine.status().state == "failed"
    assert not any(Path(f"/proc/{pid}").exists() for pid in engine.pids)


def test_a_rank_that_stands_still_is_named_when_its_time_is_over(start: Start, models: Models) -> None:
    engine = start(models.directory(), tp=2, step_timeout_s=2.0)
    answer = ask(engine, [5, 6, 7], greedy(2000))
    answer.piece()
    stop(engine.pids[1])
    with pytest.raises(RankLost, match="rank"):
        assert answer.wait().finish
    assert engine.status().state == "failed"


BROKEN: dict[str, Callable[[Path], object]] = {
    "config.json does not exist": lambda d: (d / "config.json").unlink(),
    "is not a model's configuration": lambda d: (d / "config.json").write_text("{"),
    "architecture LlamaForCausalLM": lambda d: edit_config(d, architectures=["LlamaForCausalLM"]),
    "model.safetensors": lambda d: (d / "model.safetensors").unlink(),
    "safetensors": lambda d: os.truncate(d / "model.safetensors", 5000),
    "has shape": lambda d: edit_config(d, intermediate_size=96),
    "missing": lambda d: edit_config(d, num_hidden_layers=6),
    "tokenizer.json": lambda d: (d / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_checkpoint_stops_the_start_with_one_line(
    start: Start, models: Models, tmp_path: Path, said: str
) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(models.directory(), directory)
    BROKEN[said](directory)
    with pytest.raises(CheckpointInvalid, match=said) as raised:
        start(directory, tp=2)
    assert "\n" not in str(raised.value)


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tp": 3}, "3"),
        ({"context": 10**9}, "context"),
        ({"kv_bytes": 100}, "kv_bytes"),
        ({"batch_tokens": 4}, "batch_tokens"),
    ],
)
def test_settings_that_do_not_fit_stop_the_start(
    start: Start, models: Models, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineConfigInvalid, match=said):
        start(models.directory(), **settings)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([], greedy(4)),
        ([10**6], greedy(4)),
        ([-1], greedy(4)),
        ([1], greedy(4, routing=True)),
        ([1], greedy(10**6)),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    start: Start, models: Models, prompt: list[int], sampling: Sampling
) -> None:
    with pytest.raises(RequestInvalid):
        ask(start(models.directory()), prompt, sampling)
