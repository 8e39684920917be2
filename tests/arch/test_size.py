"""Files and functions that fit in the head."""

from __future__ import annotations

import ast

import pytest

from tests.arch.source_tree import Source, source, sources

FILE_LINES = 300
FUNCTION_LINES = 40

EXCEPTIONS: dict[str, str] = {
    "liveweight/errors.py": "the whole tree in one file, drawn at its top",
    "liveweight/observe/events.py": "the list of everything that can be said, which readers match exhaustively",
    "liveweight/api.py:__init__": "its keyword arguments are the interface, and composing the parts is one sequence",
    "liveweight/cli/serve.py:serve": "its parameters are the program's options",
    "liveweight/worker/member.py:__init__": "acquires a rank's channels and threads in order, inside one stack",
    "liveweight/worker/receiver.py:__init__": "acquires a rank's parts in order, inside one stack that releases them",
}
"""`path` of a file, or `path:function`, and the reason why it is longer."""


def too_long(file: Source) -> dict[str, int]:
    """What exceeds the limits, with its number of lines. A function counts from `def` to its end."""
    lines = {file.path: len(file.text.splitlines())} if len(file.text.splitlines()) > FILE_LINES else {}
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                lines[f"{file.path}:{node.name}"] = length
    return lines


def test_no_file_and_no_function_is_too_long() -> None:
    found = {name: lines for file in sources() for name, lines in too_long(file).items()}
    assert {name: lines for name, lines in found.items() if name not in EXCEPTIONS} == {}


def test_every_exception_is_needed_and_has_a_reason() -> None:
    found = {name for file in sources() for name in too_long(file)}
    assert [name for name, reason in EXCEPTIONS.items() if name not in found or not reason] == []


def function(lines: int) -> str:
    return "@decorated\ndef f():\n" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (function(FUNCTION_LINES), {}),
        (function(FUNCTION_LINES + 1), {"liveweight/a.py:f": FUNCTION_LINES + 1}),
        ("class A:\n    async def g(self):\n" + "        pass\n" * 40, {"liveweight/a.py:g": 41}),
        ("x = 1\n" * FILE_LINES, {}),
        ("x = 1\n" * (FILE_LINES + 1), {"liveweight/a.py": FILE_LINES + 1}),
    ],
    ids=["function", "long function", "long method", "file", "long file"],
)
def test_the_limits_are_where_they_are_said_to_be(text: str, expected: dict[str, int]) -> None:
    assert too_long(source("liveweight/a.py", text)) == expected
