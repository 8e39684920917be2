"""One list of hooks on every path that changes weights, on every rank. Real ranks, real rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import liveweight as lw
from liveweight.checkpoint import SINGLE
from liveweight.engine.config import EngineConfig
from liveweight.engine.engine import Engine
from liveweight.engine.rank.hooks import BUILT_IN, hooks_of
from liveweight.errors import EngineConfigInvalid, LiveWeightError, RoundFailed
from tests.support.engine import noted_hooks
from tests.support.engine.decoders import loaded
from tests.support.engine.engines import WITHIN_S, Models, answers, greedy

HOOKS = tuple(f"{noted_hooks.__name__}:{name}" for name in ("first", "second"))
ONE_RUN = ["first", "second"]
Start = Callable[..., Engine]


class Notes:
    """What the hooks of an engine's ranks wrote down."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        self._files = [directory / str(pid) for pid in engine.pids]
        self._read = [0 for _ in self._files]

    def new(self) -> list[list[dict[str, Any]]]:
        """By rank, what came since the last time."""
        found = []
        for rank, file in enumerate(self._files):
            lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found.append(lines[self._read[rank] :])
            self._read[rank] = len(lines)
        return found

    def fail(self, rank: int, hook: str) -> None:
        """Let that hook fail there, once."""
        self._files[rank].with_suffix(".fail").write_text(hook, encoding="utf-8")


@pytest.fixture
def noted(start: Start, short_path: Path) -> Callable[..., tuple[Engine, Notes]]:
    """Engines whose hooks write down what they find."""

    def make(model: Path, notes: Path = short_path, **settings: Any) -> tuple[Engine, Notes]:
        engine = start(model, environ={noted_hooks.DIRECTORY: str(notes)}, hooks=HOOKS, **settings)
        return engine, Notes(notes, engine)

    return make


def with_norms(directory: Path, to: Path, value: float) -> Path:
    """The same model with other norms, from which the engine derives."""
    to.mkdir()
    for file in directory.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / SINGLE)
    save_file({n: t * value if n.endswith("norm.weight") else t for n, t in tensors.items()}, to / SINGLE)
    return to


def ran(notes: list[list[dict[str, Any]]]) -> list[list[str]]:
    """Which hooks ran on each rank; all of them after the engine's own."""
    assert all(note["derived"] for of_rank in notes for note in of_rank)
    return [[note["hook"] for note in of_rank] for of_rank in notes]


def held(notes: list[list[dict[str, Any]]]) -> list[str]:
    """The weights that each rank's last hook found."""
    return [of_rank[-1]["weights"] for of_rank in notes]


@pytest.mark.parametrize("shadow", ["device", "host"])
def test_the_list_runs_in_order_on_every_rank_and_on_every_path(
    noted: Any, publisher: Any, models: Models, tmp_path: Path, shadow: str
) -> None:
    engine, notes = noted(models.directory(), tp=2, updates={"shadow": shadow})
    began = notes.new()
    assert ran(began) == [ONE_RUN, ONE_RUN]
    source = publisher(engine, with_norms(models.directory(seed=1), tmp_path / "new", 1.25))
    source.publish("new")
    committed = notes.new()
    assert ran(committed) == [ONE_RUN, ONE_RUN]
    assert all(a != b for a, b in zip(held(committed), held(began), strict=True))
    engine.undo(WITHIN_S)
    undone = notes.new()
    assert ran(undone) == [ONE_RUN, ONE_RUN]
    assert held(undone) == held(began)
    notes.fail(1, "second")
    with pytest.raises(RoundFailed, match=r"second failed: RuntimeError: told to fail") as caught:
        source.publish("again")
    assert (caught.value.rank, caught.value.step) == (1, "hooks")
    answered(engine)  # a step: it follows the swap on every rank
    failed = notes.new()  # there, and back again
    assert ran(failed) == [ONE_RUN + ONE_RUN, ONE_RUN + ONE_RUN]
    assert [of_rank[1]["weights"] for of_rank in failed] == held(committed)
    assert held(failed) == held(began)
    source.publish("at last")
    assert held(notes.new()) == held(committed)


def test_after_a_failed_hook_the_old_version_serves_as_before(
    noted: Any, publisher: Any, start: Start, models: Models, tmp_path: Path
) -> None:
    new = with_norms(models.directory(seed=1), tmp_path / "new", 1.5)
    engine, notes = noted(models.directory())
    before = answered(engine)
    notes.fail(0, "first")
    source = publisher(engine, new)
    with pytest.raises(RoundFailed):
        source.publish("new")
    assert answered(engine) == before
    source.publish("new")
    assert answered(engine) == answered(start(new)) != before


def answered(engine: Engine) -> list[list[int]]:
    return [answer.ids for answer in answers(engine, [[5, 6, 7, 8], [300, 20, 7]], greedy(16))]


def test_a_hook_that_fails_at_the_start_is_named(noted: Any, models: Models, short_path: Path) -> None:
    with pytest.raises(
        LiveWeightError, match=r"hook tests.support.engine.noted_hooks:first failed: FileNotFoundError"
    ):
        noted(models.directory(), notes=short_path / "nowhere")


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        ("no_such_module:hook", "ModuleNotFoundError"),
        (f"{noted_hooks.__name__}:none", "AttributeError"),
        (f"{noted_hooks.__name__}:no_function", "is no function"),
    ],
)
def test_a_hook_that_cannot_be_had_is_refused_by_name(
    start: Start, models: Models, hook: str, problem: str
) -> None:
    with pytest.raises(EngineConfigInvalid, match=f"hook {hook}.*{problem}"):
        start(models.directory(), hooks=(hook,))


@pytest.mark.parametrize("text", ["hook", "module:", ":hook", "a b:c", "module:f()"])
def test_what_is_no_name_of_a_hook_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(EngineConfigInvalid, match="module:function"):
        EngineConfig(model="nowhere", hooks=(text,))


def test_derived_tensors_are_no_numbers_until_the_list_has_run(models: Models) -> None:
    model = loaded(models.directory())
    attention = [module for module in model.modules() if hasattr(module, "qk_weights")]
    assert len(attention) == models.layers()
    for module in attention:
        module.get_buffer("qk_weights").fill_(torch.nan)
    for hook in hooks_of(model):
        hook()
    assert all(torch.isfinite(module.get_buffer("qk_weights")).all() for module in attention)
    assert list(BUILT_IN) == ["derive"]


class TestDraftWeights:
    """What a round does to the MTP draft when its offer has none; the ranks' hooks see what they hold."""

    @pytest.mark.parametrize("shadow", ["device", "host"])
    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
    def test_keep_leaves_the_draft_as_it_is_through_commits_and_undo(
        self, noted: Any, publisher: Any, start: Start, models: Models, arch: Any, shadow: str
    ) -> None:
        old, new = models.directory(arch, mtp=True), models.directory(arch, seed=1)
        other = models.directory(arch, mtp=True, seed=2)
        engine, notes = noted(old, tp=2, updates={"draft_weights": "keep", "shadow": shadow})
        before = answered(engine)
        first = drafts(notes.new())
        report = publisher(engine, new).publish("without")
        assert (report.verified, report.replicas[0].kept) == (True, ("draft",))
        update_status = engine.update_status()
        assert (update_status.kept, update_status.rounds[-1].kept) == (("draft",), ("draft",))
        assert drafts(notes.new()) == first
        assert answered(engine) == answered(start(new, tp=2)) != before
        engine.undo(WITHIN_S)
        assert drafts(notes.new()) == first
        assert (answered(engine), engine.update_status().kept) == (before, ())
        whole = publisher(engine, other)
        assert whole.publish("whole").replicas[0].kept == ()
        second = drafts(notes.new())
        assert all(a != b for a, b in zip(first, second, strict=True))
        publisher(engine, new).publish("without again")  # over another draft: that one is kept now
        assert drafts(notes.new()) == second
        assert answered(engine) == answered(start(new, tp=2))
        engine.undo(WITHIN_S)
        assert drafts(notes.new()) == second
        assert answered(engine) == answered(start(other, tp=2))

    def test_required_refuses_with_the_names_that_are_missing(
        self, start: Start, publisher: Any, models: Models
    ) -> None:
        engine = start(models.directory(mtp=True))
        before = answered(engine)
        with pytest.raises(lw.errors.ManifestMismatch, match=r"model.layers.4.*missing"):
            publisher(engine, models.directory(seed=1))
        assert answered(engine) == before

    @pytest.mark.parametrize("mode", ["required", "keep"])
    def test_a_part_of_a_draft_is_refused_in_both_modes(
        self, start: Start, publisher: Any, models: Models, mode: str
    ) -> None:
        engine = start(models.directory(mtp=True), updates={"draft_weights": mode})
        tensors = load_file(models.directory(mtp=True, seed=1) / SINGLE)
        del tensors["model.layers.4.enorm.weight"]
        with pytest.raises(lw.errors.ManifestMismatch) as caught:
            publisher(engine, tensors)
        assert caught.value.differences == ("model.layers.4.enorm.weight missing",)

    def test_an_engine_without_a_draft_has_nothing_to_keep(
        self, start: Start, publisher: Any, models: Models
    ) -> None:
        engine = start(models.directory(mtp=True), draft=False, updates={"draft_weights": "keep"})
        assert publisher(engine, models.directory(seed=1)).publish("new").replicas[0].kept == ()


def drafts(notes: list[list[dict[str, Any]]]) -> list[str]:
    """The drafts that the ranks' hooks found."""
    assert all(len({note["draft"] for note in of_rank}) == 1 for of_rank in notes)
    return [of_rank[-1]["draft"] for of_rank in notes]
