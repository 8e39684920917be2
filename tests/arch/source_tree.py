"""The source as the house rules see it: parsed files, their place in the layout, and what their names mean."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = "liveweight"
FRAMEWORKS = ("integrations.trl",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One Python file of the package. `module` is its dotted name, without `__init__`; `nodes` are all of its tree."""

    path: str
    module: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def is_package(self) -> bool:
        """Whether the file is a folder's `__init__`."""
        return self.path.endswith("__init__.py")

    @property
    def part(self) -> str:
        """The name in the layout's order that the file belongs to."""
        return part_of(self.module)

    def at(self, node: ast.stmt | ast.expr, what: str) -> str:
        """A violation, as it is shown."""
        return f"{self.path}:{node.lineno}: {what}"


def part_of(module: str) -> str:
    """The first name below the package. The package itself counts as `api`, `python -m` as `cli`. Adapters of training frameworks are parts
    of their own: they use what a training loop uses, while `api` uses the adapters of engines beside them."""
    first, _, rest = module.partition(".")[2].partition(".")
    second = f"{first}.{rest.partition('.')[0]}"
    if second in FRAMEWORKS:
        return second
    return {"": "api", "__main__": "cli"}.get(first, first)


def source(path: str, text: str) -> Source:
    """A Source from a path below `src/` and its text."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(text, path)
    return Source(path=path, module=module, text=text, tree=tree, nodes=tuple(ast.walk(tree)))


@functools.cache
def sources() -> list[Source]:
    """Every Python file of the package. Never empty, so that no rule passes for want of files."""
    paths = sorted((SRC / PACKAGE).rglob("*.py"))
    found = [source(path.relative_to(SRC).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    if not any(file.module == f"{PACKAGE}.errors" for file in found):
        raise FileNotFoundError(f"no source found below {SRC}")
    return found


@functools.cache
def imports(file: Source) -> tuple[tuple[ast.stmt | ast.expr, str], ...]:
    """Every module or name that the file imports, at any depth and under any condition, as absolute names."""
    return tuple(_imported(file))


def _imported(file: Source) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    for node in file.nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(file, module or "", level)
                yield from ((node, f"{base}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _imports(function):
                level = len(name) - len(name.lstrip("."))
                yield node, _absolute(file, name[level:], level)


def _imports(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("import_module", "__import__")
    return False


def _absolute(file: Source, module: str, level: int) -> str:
    if level == 0:
        return module
    up = level - 1 if file.is_package else level
    base = file.module.split(".")[: -up or None]
    return ".".join([*base, module] if module else base)


@functools.cache
def names(file: Source) -> tuple[tuple[ast.expr, str], ...]:
    """Every name that is used, spelled out: `o.environ` after `import os as o` is `os.environ`."""
    return tuple(_used(file))


def _used(file: Source) -> Iterator[tuple[ast.expr, str]]:
    known = aliases(file)
    for node in file.nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            name = spelled_out(node, known)
            if name is not None:
                yield node, name


@functools.cache
def aliases(file: Source) -> dict[str, str]:
    """What the names that the file imports stand for. (One table per file: scopes make no difference.)"""
    known: dict[str, str] = {}
    for node in file.nodes:
        match node:
            case ast.Import(names=names):
                known |= {alias.asname: alias.name for alias in names if alias.asname is not None}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(file, module or "", level)
                known |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in names}
    return known


def spelled_out(node: ast.expr, known: dict[str, str]) -> str | None:
    """The full dotted name of an expression; None where it is no plain name."""
    match node:
        case ast.Name(id=name):
            return known.get(name, name)
        case ast.Attribute(value=value, attr=attribute):
            base = spelled_out(value, known)
            return None if base is None else f"{base}.{attribute}"
    return None
