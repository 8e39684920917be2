"""A name means one thing, and a folder holds one subject."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from tests.arch.source_tree import Source, source, sources

FOLDER_FILES = 16


def classes(file: Source) -> Iterator[str]:
    """The file's public classes, also those defined under a condition."""
    for node in file.nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def twice(files: Iterable[Source]) -> dict[str, list[str]]:
    """Public class names that occur more than once, with the files that have them."""
    homes = defaultdict(list)
    for file in files:
        for name in classes(file):
            homes[name].append(file.path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def crowded(files: Iterable[Source]) -> dict[str, int]:
    """Folders with too many files."""
    counts = Counter(file.path.rpartition("/")[0] for file in files)
    return {folder: count for folder, count in counts.items() if count > FOLDER_FILES}


def test_no_two_public_classes_have_one_name() -> None:
    assert twice(sources()) == {}


def test_no_folder_is_crowded() -> None:
    assert crowded(sources()) == {}


def test_a_name_that_is_used_twice_is_found() -> None:
    first = source("liveweight/wire/a.py", "class Round: ...\nclass _Private: ...")
    second = source("liveweight/spec/b.py", "if True:\n    class Round: ...\nclass _Private: ...")
    assert twice([first, second]) == {"Round": ["liveweight/wire/a.py", "liveweight/spec/b.py"]}
    assert twice([source("liveweight/a.py", "class A:\n    class B: ...\nclass B: ...")]) == {
        "B": ["liveweight/a.py", "liveweight/a.py"]
    }
    assert twice([first, source("liveweight/spec/b.py", "class Rounds: ...")]) == {}


def test_a_crowded_folder_is_found() -> None:
    files = [source(f"liveweight/wire/a{number}.py", "") for number in range(FOLDER_FILES + 1)]
    assert crowded(files[1:]) == {}
    assert crowded(files) == {"liveweight/wire": FOLDER_FILES + 1}


def longest(files: Iterable[Source]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The ten longest files and the ten longest functions, in lines. A function counts from `def` to its end."""
    by_file, by_function = [], []
    for file in files:
        by_file.append((len(file.text.splitlines()), file.path))
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                by_function.append((lines, f"{file.path}:{node.name}"))
    return sorted(by_file, reverse=True)[:10], sorted(by_function, reverse=True)[:10]


def test_the_longest_files_and_functions_are_listed() -> None:
    """No limit: a file holds one idea whole. `pytest -s` prints the list, for whoever looks for something to split."""
    files, functions = longest(sources())
    print("\n".join(f"{lines:5} {where}" for lines, where in (*files, *functions)))  # noqa: T201
    assert (len(files), len(functions)) == (10, 10)
    example = source("liveweight/a.py", "@decorated\ndef f():\n    pass\n    pass\n\n\nx = 1\n")
    assert longest([example]) == ([(7, "liveweight/a.py")], [(3, "liveweight/a.py:f")])
