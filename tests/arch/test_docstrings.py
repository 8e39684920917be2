"""Every public name says what it is for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.arch.source_tree import Source, source, sources

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def violations(file: Source) -> list[str]:
    found = [] if ast.get_docstring(file.tree) else [f"{file.path}:1: the module has no docstring"]
    bare = [node for node in public(file.tree.body) if not ast.get_docstring(node)]
    return found + [file.at(node, f"{node.name} has no docstring") for node in bare]


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """Public classes, functions and methods, also those defined under a condition; not what is local to a function."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if not node.name.startswith("_") and not explained_elsewhere(node):
                    yield node
                    yield from public(node.body if isinstance(node, ast.ClassDef) else [])
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield from public(
                    [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
                )
                for handler in getattr(node, "handlers", []):
                    yield from public(handler.body)


def explained_elsewhere(node: Definition) -> bool:
    """Overrides, overloads and setters: the one they belong to has the docstring."""
    ends = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not ends.isdisjoint({"override", "overload", "setter", "deleter"})


def test_every_public_name_has_a_docstring() -> None:
    assert [violation for file in sources() for violation in violations(file)] == []


WRONG = {
    "module": "x = 1",
    "function": '"""M."""\ndef f(): ...',
    "async function": '"""M."""\nasync def f(): ...',
    "class": '"""M."""\nclass A: ...',
    "method": '"""M."""\nclass A:\n    """A."""\n    def f(self): ...',
    "property": '"""M."""\nclass A:\n    """A."""\n    @property\n    def f(self): ...',
    "inner class": '"""M."""\nclass A:\n    """A."""\n    class B: ...',
    "method of a protocol": '"""M."""\nclass A(Protocol):\n    """A."""\n    def f(self) -> int: ...',
    "dataclass": '"""M."""\n@dataclass(frozen=True)\nclass A:\n    x: int',
    "under a condition": '"""M."""\nif a:\n    pass\nelse:\n    def f(): ...',
    "in a fallback": '"""M."""\ntry:\n    pass\nexcept ImportError:\n    def f(): ...',
    "empty docstring": '"""M."""\ndef f():\n    ""',
}


@pytest.mark.parametrize("case", WRONG)
def test_a_missing_docstring_is_found(case: str) -> None:
    assert len(violations(source("liveweight/wire/a.py", WRONG[case]))) == 1


RIGHT = {
    "documented": '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""',
    "private": '"""M."""\ndef _f(): ...\nclass _A:\n    def f(self): ...',
    "dunder": '"""M."""\nclass A:\n    """A."""\n    def __init__(self): ...',
    "override": '"""M."""\nclass A:\n    """A."""\n    @typing.override\n    def f(self): ...',
    "setter": '"""M."""\nclass A:\n    """A."""\n    @x.setter\n    def x(self, v): ...',
    "local": '"""M."""\ndef f():\n    """F."""\n    def g(): ...',
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_needs_no_docstring_passes(case: str) -> None:
    assert violations(source("liveweight/wire/a.py", RIGHT[case])) == []
