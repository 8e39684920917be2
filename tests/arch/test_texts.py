"""What the pages and the repository's texts say is true here, and elsewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tests.arch.source_tree import ROOT

PAGES = ("README.md", "CONTRIBUTING.md")

# One letter of each pattern stands in brackets, so that this file does not find itself.
LOCAL = {
    "a path of one machine": r"(?<![\w.~-])/(?:roo[t]|hom[e])(?:/|\b(?![\w-]))",
    "a package index": r"inde[x]-url|find-link[s]",
}


def code_in(page: str) -> list[str]:
    """The lines of fenced blocks, and the spans between backticks."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [line for block in fenced for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", prose)


def targets_named(page: str) -> set[str]:
    """Every X of a `make X` that a page tells the reader to run."""
    runs = [re.match(r"(?:\$ )?make((?: [a-z][\w-]*)+)", code.strip()) for code in code_in(page)]
    return {target for run in runs if run is not None for target in run[1].split()}


def markers_named(text: str) -> set[str]:
    """Every marker that a `pytest -m` asks for."""
    asked = re.findall(r"pytest [^\n]*?-m (?:\"([^\"]+)\"|(\w+))", text)
    return {word for pair in asked for word in re.findall(r"\w+", "".join(pair))} - {"not", "and", "or"}


def targets_of(makefile: str) -> set[str]:
    """The targets that a Makefile has rules for."""
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, flags=re.MULTILINE))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_target_that_a_page_names_exists(page: str) -> None:
    named = targets_named(read(page))
    assert {"check", "test"} <= named
    assert named - targets_of(read("Makefile")) == set()


def test_ci_runs_the_checks_and_all_tests_but_the_long_ones() -> None:
    ran = re.findall(r"^(?:hostile )?make .+$", read(".ci/run"), flags=re.MULTILINE)
    assert ran == [
        "make environments",
        "make check",
        "hostile make test",
        "make test-paddle",
        "make test-trl",
        "make test-vllm",
    ]


def test_every_marker_that_is_named_exists() -> None:
    configured = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]["markers"]
    named = markers_named("\n".join(read(path) for path in (*PAGES, "Makefile")))
    assert "soak" in named
    assert named - {marker.partition(":")[0] for marker in configured} == set()


def test_a_target_or_marker_that_does_not_exist_is_found() -> None:
    page = "Run `make tset`, and make sure to:\n\n```sh\nmake chekc wheel\npytest -m sloow\n```\n"
    assert targets_named(page) == {"tset", "chekc", "wheel"}
    assert markers_named(page + 'pytest -m "not soak"') == {"sloow", "soak"}
    assert targets_of("a: b\n\tc: d\nX := y\nb:=c\nd-e:\n") == {"a", "d-e"}


def repository_texts() -> dict[str, str]:
    """Every text of the repository, tracked or about to be, by path."""
    git = ["git", "-c", "safe.directory=*"]  # the session's home has no settings of git
    command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60).stdout.decode()
    texts = {}
    for path in filter(None, listed.split("\0")):
        content = (ROOT / path).read_bytes() if (ROOT / path).is_file() else b""
        if b"\0" not in content:
            texts[path] = content.decode("utf-8")
    return texts


def local_in(texts: dict[str, str]) -> list[str]:
    """Each line that would not be true, or not be understood, on another machine."""
    return [
        f"{path}:{number}: {what}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in LOCAL.items()
        if re.search(pattern, line)
    ]


def test_no_text_speaks_of_one_machine() -> None:
    texts = repository_texts()
    assert {"README.md", "Makefile", "src/liveweight/errors.py"} <= set(texts)
    assert local_in(texts) == []


@pytest.mark.parametrize(
    "words",
    [
        ("cd ", "/roo", "t"),
        ('"', "/hom", "e/me/x"),
        ("pip --inde", "x-url x"),
        ("--find-", "links x"),
    ],
)
def test_a_local_text_is_found(words: tuple[str, ...]) -> None:
    assert len(local_in({"a.md": "fine\n" + "".join(words)})) == 1


@pytest.mark.parametrize("text", ["a/home/b", "http://host/home", "src/worker/round.py", "and/or", "~/home"])
def test_a_harmless_text_passes(text: str) -> None:
    assert local_in({"a.md": text}) == []
