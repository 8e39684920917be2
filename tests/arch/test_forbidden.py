"""What the source may not do, and the few places where it may."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.arch.source_tree import PACKAGE, Source, aliases, imports, names, source, sources, spelled_out

Found = Iterator[tuple[ast.stmt | ast.expr, str]]

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
PRINT = {"print", "builtins.print", "pprint.pprint", "pprint.pp"}
EXIT = {"exit", "quit", "sys.exit", "sys.argv", "os._exit", "builtins.exit", "builtins.quit"}
PICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickletools",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "copyreg",
}
PICKLING = {
    *("torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"),
    "concurrent.futures.ProcessPoolExecutor",
}
PICKLING_QUEUES = {"Queue", "JoinableQueue", "SimpleQueue", "Pipe", "Manager", "Pool"}
PICKLING_METHODS = {
    *("send_pyobj", "recv_pyobj"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}

DECODING = {
    *(f"msgspec.{form}.{way}" for form in ("json", "msgpack") for way in ("decode", "Decoder")),
    "msgspec.convert",
}


def uses(forbidden: set[str]) -> Callable[[Source], Found]:
    """A rule against names, however they were imported."""

    def rule(file: Source) -> Found:
        yield from ((node, name) for node, name in names(file) if name in forbidden)
        yield from ((node, name) for node, name in imports(file) if name in forbidden)

    return rule


def exits(file: Source) -> Found:
    """Exit codes and arguments of the program, also as an exception."""
    yield from uses(EXIT)(file)
    for node in file.nodes:
        if isinstance(node, ast.Raise) and "SystemExit" in ast.unparse(node):
            yield node, "SystemExit"


def pickles(file: Source) -> Found:
    """Ways to turn bytes into objects of any class."""
    yield from uses(PICKLING)(file)
    yield from ((node, name) for node, name in imports(file) if PICKLERS & set(name.split(".")))
    forks = any("multiprocessing" in name.split(".") for _, name in imports(file))
    for node, name in (*names(file), *imports(file)):
        base, _, last = name.rpartition(".")
        queue = forks and last in PICKLING_QUEUES and base not in ("queue", "asyncio")
        if queue or last in PICKLING_METHODS:
            yield node, name
    for word in file.nodes:
        if (
            isinstance(word, ast.keyword)
            and word.arg == "allow_pickle"
            and ast.unparse(word.value) != "False"
        ):
            yield word.value, "allow_pickle"


def finalisers(file: Source) -> Found:
    """Clean-up that no `with` orders."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node, "__del__"
    yield from ((node, name) for node, name in imports(file) if name.partition(".")[0] == "atexit")


def asserts(file: Source) -> Found:
    """Validation that `python -O` removes."""
    yield from ((node, "assert") for node in file.nodes if isinstance(node, ast.Assert))


def decoders(file: Source) -> Found:
    """Decoders of types that another thread may be about to prepare, but in the one file that takes turns."""
    if file.module == f"{PACKAGE}.spec.decoders":
        return
    known = aliases(file)
    for node in file.nodes:
        if isinstance(node, ast.Call) and spelled_out(node.func, known) in DECODING:
            yield node, ast.unparse(node.func)


def drawers(file: Source) -> Found:
    """Modules and folders that are named after nothing in particular."""
    if {"utils", "util"} & set(file.module.split(".")):
        yield ast.Pass(lineno=1, col_offset=0), file.module


def stray_errors(file: Source) -> Found:
    """Classes of the error tree outside the one file that draws it."""
    known = aliases(file)
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            bases = [spelled_out(base, known) or "" for base in node.bases]
            if any(base.startswith(f"{PACKAGE}.errors.") for base in bases):
                yield node, node.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is forbidden, the parts (or the one package) where it is allowed, and sources that it must find."""

    find: Callable[[Source], Found]
    allowed_in: frozenset[str] = frozenset()
    allowed_under: str | None = None
    wrong: tuple[str, ...]
    right: str = ""

    def violations(self, file: Source) -> list[str]:
        """Each place where the file breaks the rule."""
        under = self.allowed_under
        if file.part in self.allowed_in or (under is not None and file.module.startswith(f"{under}.")):
            return []
        return [file.at(node, what) for node, what in self.find(file)]


CLI = frozenset({"cli"})
RULES = {
    "environment": Rule(
        find=uses(ENVIRONMENT),
        allowed_in=CLI | {"integrations"},
        wrong=(
            "import os\nos.environ['A']",
            "import os as o\ndef f(): return o.environ.get('A')",
            "from os import environ",
            "from os import getenv as g\ng('A')",
            "import os\nos.getenv('A')",
            "import os\nos.environb",
        ),
        right="import os\nos.getpid()\nenviron = {}\nenviron.get('A')",
    ),
    "print": Rule(
        find=uses(PRINT),
        allowed_in=CLI,
        wrong=(
            "print('a')",
            "say = print",
            "import builtins\nbuiltins.print(1)",
            "from pprint import pprint",
        ),
        right="table.print()\nfootprint = 1",
    ),
    "exit": Rule(
        find=exits,
        allowed_in=CLI,
        wrong=(
            "import sys\nsys.exit(1)",
            "from sys import exit as leave",
            "exit()",
            "quit()",
            "raise SystemExit(2)",
            "import os\nos._exit(1)",
            "import sys\nsys.argv[1]",
        ),
        right="import sys\nsys.version\nself.exit()",
    ),
    "pickle": Rule(
        find=pickles,
        allowed_under="liveweight.lab.bench.peers",  # what others do is measured as they do it, in processes of its own
        wrong=(
            "import pickle",
            "from pickle import loads",
            "import cloudpickle as c",
            "def f():\n    import dill",
            "import marshal",
            "import shelve",
            "import importlib\nimportlib.import_module('pickle')",
            "import torch\ntorch.load('a')",
            "import torch as t\nt.save({}, 'a')",
            "from torch import load",
            "import multiprocessing as mp\nmp.Queue()",
            "from multiprocessing import Pipe",
            "import multiprocessing\ncontext = multiprocessing.get_context('spawn')\ncontext.Queue()",
            "import torch.multiprocessing as mp\nmp.SimpleQueue()",
            "import numpy as np\nnp.load('a', allow_pickle=True)",
            "import numpy as np\nnp.load('a', allow_pickle=flag)",
            "socket.send_pyobj(1)",
            "import torch.distributed as dist\ndist.broadcast_object_list([])",
        ),
        right=(
            "import json, queue, multiprocessing\nqueue.Queue()\nmultiprocessing.Process()\n"
            "json.load(f)\nnp.load('a', allow_pickle=False)"
        ),
    ),
    "decoders": Rule(
        find=decoders,
        wrong=(
            "import msgspec\nmsgspec.json.decode(b'', type=A)",
            "import msgspec as m\nm.msgpack.Decoder(A)",
            "from msgspec import convert\nconvert({}, A)",
            "from msgspec.json import decode\ndecode(b'', type=A)",
        ),
        right="import msgspec\na: msgspec.json.Decoder[int] = json_decoder(int)\na.decode(b'')\nb''.decode()",
    ),
    "finalisers": Rule(
        find=finalisers,
        wrong=("class A:\n    def __del__(self): ...", "import atexit", "from atexit import register"),
        right="class A:\n    def __exit__(self, *a): ...\ndel a",
    ),
    "sleep": Rule(
        find=uses({"time.sleep"}),
        wrong=("import time\ntime.sleep(1)", "from time import sleep", "import time as t\nwait = t.sleep"),
        right="import time\ntime.monotonic()\nengine.sleep(['kv'])",
    ),
    "assert": Rule(
        find=asserts,
        wrong=("assert x", "def f(x):\n    assert isinstance(x, int), 'no'"),
        right="from typing import assert_never\nassert_never(x)",
    ),
    "stray errors": Rule(
        find=stray_errors,
        allowed_in=frozenset({"errors"}),
        wrong=(
            "from liveweight.errors import Refused\nclass A(Refused): ...",
            "from liveweight import errors\nclass A(errors.Torn): ...",
            "from ..errors import Damage as D\nclass A(D): ...",
        ),
        right="from liveweight.errors import Refused\nclass A(Protocol): ...",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_source_keeps_the_rule(rule: str) -> None:
    assert [violation for file in sources() for violation in RULES[rule].violations(file)] == []


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in RULES for text in RULES[rule].wrong])
def test_a_violation_is_found(rule: str, text: str) -> None:
    assert RULES[rule].violations(source("liveweight/wire/a.py", text)) != []


@pytest.mark.parametrize("rule", RULES)
def test_what_only_looks_alike_passes(rule: str) -> None:
    assert RULES[rule].violations(source("liveweight/wire/a.py", RULES[rule].right)) == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if RULES[rule].allowed_in])
def test_a_violation_passes_only_where_it_is_allowed(rule: str) -> None:
    for part in RULES[rule].allowed_in:
        assert RULES[rule].violations(source(f"liveweight/{part}/a.py", RULES[rule].wrong[0])) == []
    assert RULES[rule].violations(source("liveweight/lab/bench/a.py", RULES[rule].wrong[0])) != []


def test_a_contender_of_the_benchmark_may_pickle_and_its_neighbours_may_not() -> None:
    rule, text = RULES["pickle"], "import pickle"
    assert rule.violations(source("liveweight/lab/bench/peers/a.py", text)) == []
    for path in (
        "liveweight/lab/bench/peers.py",
        "liveweight/lab/bench/a.py",
        "liveweight/lab/bench/peers_too/a.py",
    ):
        assert rule.violations(source(path, text)) != []


def test_no_module_or_folder_is_called_utils() -> None:
    assert [file.path for file in sources() for _ in drawers(file)] == []


@pytest.mark.parametrize(
    "path", ["liveweight/utils.py", "liveweight/wire/utils/a.py", "liveweight/util/__init__.py"]
)
def test_a_module_called_utils_is_found(path: str) -> None:
    assert list(drawers(source(path, ""))) != []
