"""Every command of the program: an example that its own parser takes, documented exit codes, errors in one line."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from liveweight.cli import exit_codes
from liveweight.cli.commands import doctor
from liveweight.cli.failures import error_line
from liveweight.cli.main import app
from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.errors import DeadlineExceeded, LiveWeightError, RoundFailed, catalogue
from tests.arch.source_tree import PACKAGE, ROOT, SRC

EXAMPLE = re.compile(r"(?:For example|And the engine): (liveweight .+)")
NOBODY = "http://127.0.0.1:9"  # the discard port
REMEDIES = {error.code: error.remedy for error in catalogue()}


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group of the tree, the program itself first."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


TREE = dict(walk(get_command(app)))
LEAVES = {path for path, command in TREE.items() if not getattr(command, "commands", {})} | {("demo",)}


def examples(path: tuple[str, ...]) -> list[list[str]]:
    return [shlex.split(found)[1:] for found in EXAMPLE.findall(TREE[path].help or "")]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    return result.exit_code, result.stdout, result.stderr


def test_the_tree_is_the_whole_program() -> None:
    assert len(LEAVES) >= 24


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_help_shows_an_example_that_the_commands_own_parser_takes(path: tuple[str, ...]) -> None:
    code, shown, _ = run(*path, "--help")
    assert code == exit_codes.DONE
    found = examples(path)
    assert found, "no example"
    assert tuple(found[0][: len(path)]) == path, "of another command"
    for words in found:
        assert shlex.join(words) in shown
        depth = max(depth for depth in range(3) if tuple(words[:depth]) in TREE)
        command = TREE[tuple(words[:depth])]
        with command.make_context(words[depth - 1], words[depth:]) as context:  # parses, and runs nothing
            assert context.params.keys() >= {"debug"}


def test_an_example_with_an_option_that_is_not_there_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--nobody"):
        TREE[("undo",)].make_context("undo", [NOBODY, "--nobody"])


def test_the_operations_page_and_the_help_tell_the_exit_codes() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d", line)]
    assert rows == [f"| {row.code} | {row.commands} | {row.means} |" for row in exit_codes.EXITS]
    shown = " ".join(run("--help")[1].split())
    assert " ".join(exit_codes.exit_codes_text().split()) in shown


def codes_used() -> set[str]:
    """The argument of every `Exit(...)` and `SystemExit(...)` of the command line."""
    used = set()
    for file in (SRC / PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"typer.Exit", "SystemExit"}:
                used |= {ast.unparse(argument) for argument in node.args}
    return used


def test_the_codes_that_are_told_are_those_that_are_used() -> None:
    used = {
        name for name in codes_used() if not name.startswith("f'")
    }  # a text is exit code 1 with that text
    assert all(hasattr(exit_codes, name) for name in used), used
    by_typer = {exit_codes.WRONG_ARGUMENTS}
    assert {getattr(exit_codes, name) for name in used} | by_typer == {row.code for row in exit_codes.EXITS}


@pytest.mark.parametrize("path", sorted(LEAVES), ids=" ".join)
def test_wrong_arguments_have_a_code_of_their_own(path: tuple[str, ...]) -> None:
    assert run(*path, "--nobody")[0] == exit_codes.WRONG_ARGUMENTS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    init_model(directory, SIZES["qwen3"]["tiny"])
    return directory


ERRORS: dict[str, tuple[Sequence[str], str]] = {
    "init-model": (("MODEL",), "LW-702"),
    "serve": (("NOWHERE",), "LW-701"),
    "serve, bad address": (("MODEL", "--port", "0", "--weights-address", "nowhere"), "LW-504"),
    "push": (("NOWHERE", NOBODY, "--version", "1"), "LW-205"),
    "push, bad address": (("NOWHERE", "nobody", "--version", "1"), "LW-203"),
    "push, bad label": (("NOWHERE", NOBODY, "--version", ""), "LW-112"),
    "offer": (("NOWHERE", "--version", "1"), "LW-102"),
    "offer, bad label": (("MODEL", "--version", "a\nb"), "LW-112"),
    "offer, bad address": (("MODEL", "--version", "1", "--address", "nowhere"), "LW-504"),
    "update": ((NOBODY,), "LW-205"),
    "verify": (("MODEL", NOBODY), "LW-205"),
    "status": ((NOBODY,), "LW-205"),
    "undo": (("nobody",), "LW-203"),
    "pause": ((NOBODY,), "LW-205"),
    "resume": ((NOBODY,), "LW-205"),
    "sleep": ((NOBODY,), "LW-205"),
    "wakeup": ((NOBODY,), "LW-205"),
    "snapshot save": (("NOWHERE", "STORE", "--version", "1"), "LW-102"),
    "snapshot list": (("NOWHERE",), "LW-110"),
    "snapshot inspect": (("NOWHERE",), "LW-110"),
    "snapshot verify": (("NOWHERE",), "LW-110"),
    "snapshot export": (("NOWHERE", "STORE"), "LW-110"),
    "snapshot prune": (("NOWHERE", "--keep", "1"), "LW-110"),
    "bench engine": (("--model", "NOWHERE"), "LW-701"),
    "bench live": (("--model", "NOWHERE"), "LW-701"),
    "bench vllm": (("--python", "NOWHERE"), "[Errno"),
    "bench snapshot": (("--directory", "NOWHERE", "--size-gb", "0.001"), "[Errno"),
}
"""Arguments that cannot work, and how the line begins. Those of other commands are provoked below."""
ELSEWHERE = {
    "doctor",
    "demo",
    "demo torn",
    "torture",
    "bench digest",
    "bench ipc",
    "bench nixl",
    "bench peers",
    "bench idle",
    "bench growth",
    "bench all",
}


def test_every_command_is_provoked() -> None:
    assert {name.partition(",")[0] for name in ERRORS} | ELSEWHERE == {" ".join(path) for path in LEAVES}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line_with_the_remedy_and_a_traceback_if_asked_for(
    model: Path, short_path: Path, case: str
) -> None:
    places = {
        "MODEL": str(model),
        "NOWHERE": str(short_path / "nowhere"),
        "STORE": str(short_path / "store"),
    }
    given, beginning = ERRORS[case]
    words = [*case.partition(",")[0].split(), *(places.get(word, word) for word in given)]
    code, _, said = run(*words)
    assert code == exit_codes.FAILED, said
    assert len(said.splitlines()) == 1, said
    assert said.startswith(beginning), said
    assert said.endswith(".\n")
    assert f"What to do: {REMEDIES.get(beginning, 'see that the file')}" in said
    code, _, loud = run(*words, "--debug")
    assert code == exit_codes.FAILED
    assert loud.startswith("Traceback ") or "\nTraceback " in loud
    shown = said.splitlines()[-1].partition("nowhere")[0][:40]  # names of temporary files differ
    assert any(line.startswith(shown) for line in loud.splitlines()), loud


def test_an_error_that_nobody_expected_is_one_line_that_names_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise RuntimeError("a bug\nof two lines")

    monkeypatch.setattr(doctor, "examine", examine)
    code, _, said = run("doctor")
    assert (code, said) == (
        exit_codes.FAILED,
        "unexpected RuntimeError: a bug of two lines. What to do: run it again with --debug, and report what it says.\n",
    )
    assert "Traceback " in run("doctor", "--debug")[2]


def test_ctrl_c_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", examine)
    assert run("doctor") == (exit_codes.INTERRUPTED, "", "")


@pytest.mark.parametrize("command", ["demo", "demo torn", "torture"])
def test_a_missing_extra_is_the_pip_line(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    for module in ("demo.demo", "demo.torn", "commands.torture"):
        monkeypatch.setattr(f"liveweight.cli.{module}.find_spec", lambda _: None)
    code, _, said = run(*command.split())
    assert (code, len(said.splitlines())) == (exit_codes.FAILED, 1)
    assert said.startswith("LW-501 ")
    assert "pip install 'liveweight[" in said


@pytest.mark.parametrize(
    "command", ["bench digest", "bench ipc", "bench nixl", "bench peers", "torture", "demo"]
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    option = (
        ("--out", str(tmp_path / "file")) if command == "demo" else ("--json", str(tmp_path / "no" / "x"))
    )
    code, _, said = run(*command.split(), *option)
    assert (code, "is not a directory" in said) == (exit_codes.WRONG_ARGUMENTS, True)


def test_a_failed_round_is_told_with_the_remedy_of_its_cause() -> None:
    cause = DeadlineExceeded("rank 1 to stage", 5.0)
    failed = RoundFailed(cause, replica="a", rank=1, step="stage", waited_s=5.0, serving="step_1")
    line = error_line(failed)
    assert line.startswith("LW-301 stage failed at a, rank 1")
    assert line.endswith(f"a retry may help. What to do: {cause.remedy}.")


def test_a_lost_rank_is_told_as_any_other_error() -> None:
    error = LiveWeightError("lost")
    assert error_line(error) == f"LW-000 lost. What to do: {error.remedy}."
    assert issubclass(typer.Exit, RuntimeError), "it is caught before what is unexpected"
