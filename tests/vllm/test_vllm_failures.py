"""Rounds that fail, in a real vLLM: it serves the version before, the next round succeeds; or it stays paused, and the error says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import liveweight as lw
from liveweight.errors import DeadlineExceeded, DigestMismatch, RoundFailed, Unavailable
from liveweight.integrations.vllm.engine import VllmEngine
from liveweight.spec.deadline import Deadline
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.messages import ReplicaState
from tests.arch.source_tree import ROOT
from tests.support.processes.stopping import stop
from tests.vllm.models import llama
from tests.vllm.serving import WITHIN_S, Answer, Server

pytestmark = pytest.mark.timeout(1200)

SLOW = 100_000
"""Bytes per second: the model has about 2 MB, so that staging it lasts."""

TRAINER = """
import sys
from pathlib import Path
import liveweight as lw
url, secret, directory, pace = sys.argv[1:]
publisher = lw.Publisher(Path(directory), engines=[lw.vllm(url, pace_bytes_per_s=float(pace))], secret=Path(secret), timeout_s=600)
publisher.offer("doomed")
print("offered", flush=True)
sys.stdin.read()
"""


def looked_at(server: Server) -> ReplicaState:
    """The state of the server's replica, read by another client than its publisher, with the same pace."""
    engine: VllmEngine = lw.vllm(server.url, pace_bytes_per_s=SLOW)
    replica = engine.replica(load_or_create_secret(server.secret), server.secret)
    try:
        return replica.replica_state(Deadline.after(WITHIN_S))
    finally:
        replica.close()


def until_idle(server: Server) -> None:
    """Wait until no round is open."""
    deadline = Deadline.after(WITHIN_S)
    while looked_at(server).round is not None:
        deadline.check("the round to end")


def publishes(server: Server, source: object, label: str, *, timeout_s: float = WITHIN_S) -> None:
    with lw.Publisher(
        source, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=timeout_s
    ) as trainer:
        trainer.publish(label)


@contextmanager
def staging(server: Server, new: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer in a process of its own, whose round is open, and is staged slowly."""
    arguments = [server.url, str(server.secret), str(new), str(SLOW)]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", TRAINER, *arguments]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "offered\n"
            deadline = Deadline.after(WITHIN_S)
            while looked_at(server).round is None:
                deadline.check("the round to open")
            yield trainer
        finally:
            trainer.kill()


def succeeds_next(server: Server, before: Answer, fresh: Answer, base: Path) -> None:
    """The server is as it was, and takes rounds: there and back."""
    assert server.answer() == before
    publishes(server, llama(1), "next")
    assert server.answer() == fresh
    publishes(server, base, "back")
    assert server.answer() == before


def test_a_trainer_that_is_killed_while_staging_leaves_nothing(
    server: Server, before: Answer, fresh: Answer, base: Path, new: Path
) -> None:
    with staging(server, new) as trainer:
        assert server.answer() == before
        trainer.kill()
        until_idle(server)
    succeeds_next(server, before, fresh, base)


def test_an_arena_that_is_damaged_is_named_and_not_installed(
    server: Server, before: Answer, fresh: Answer, base: Path
) -> None:
    def damage() -> None:
        for number in Path(f"/proc/{server.workers()[0]}/fd").iterdir():
            if "memfd:liveweight-vllm" in str(number.readlink()):
                with number.open("r+b") as arena:
                    arena.seek(4096)
                    arena.write(b"\xa5" * 64)

    engine = lw.vllm(server.url, pace_bytes_per_s=SLOW * 10)
    with lw.Publisher(llama(1), engines=[engine], secret=server.secret, timeout_s=WITHIN_S) as trainer:
        trainer.offer("damaged")
        replica = trainer._replicas[0]
        deadline = Deadline.after(WITHIN_S)
        while True:
            deadline.check("the round to end")
            damage()
            if trainer._round is not None and trainer._round.outcome.done():
                break
        with pytest.raises(RoundFailed) as failed:
            trainer.wait()
        assert failed.value.code == DigestMismatch.code
        assert replica.name == server.url
    succeeds_next(server, before, fresh, base)


def test_a_worker_that_stands_still_is_named_and_wakes_up_on_the_old_version(
    server: Server, before: Answer, fresh: Answer, base: Path, new: Path
) -> None:
    pid = server.workers()[0]
    with lw.Publisher(
        new, engines=[lw.vllm(server.url)], secret=server.secret, timeout_s=WITHIN_S
    ) as trainer:
        trainer.settings = replace(trainer.settings, timeout_s=5.0)
        stop(pid)
        try:
            with pytest.raises(RoundFailed) as failed:
                trainer.publish("unheard")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert failed.value.code == DeadlineExceeded.code
    until_idle(server)
    succeeds_next(server, before, fresh, base)


@pytest.mark.parametrize(
    ("tensors", "how"), [("0", "by vLLM"), ("7", "by vLLM"), ("26", "by vLLM"), ("7", "as it is")]
)
def test_an_install_that_fails_on_the_way_puts_the_old_version_back(
    server: Server, before: Answer, fresh: Answer, base: Path, tensors: str, how: str
) -> None:
    server.tell_workers("fail_loading", tensors, "1", how)
    with pytest.raises(RoundFailed, match="a test wants") as failed:
        publishes(server, llama(1), f"failing_{tensors}")
    assert (failed.value.code, failed.value.rank, failed.value.step) == (Unavailable.code, 0, "commit")
    assert not server.get("/is_paused")["is_paused"]
    succeeds_next(server, before, fresh, base)


def test_a_commit_that_looks_at_what_is_installed_goes_back_where_that_differs(
    server: Server, before: Answer, fresh: Answer, base: Path
) -> None:
    engine = lw.vllm(server.url, verify="installed")
    with lw.Publisher(llama(1), engines=[engine], secret=server.secret, timeout_s=WITHIN_S) as trainer:
        server.tell_workers("spoil_loading")
        with pytest.raises(RoundFailed, match=r"model\.norm\.weight") as failed:
            trainer.publish("spoiled")
        assert failed.value.code == DigestMismatch.code
        assert server.answer() == before
        report = trainer.publish("looked_at")
        assert report.replicas[0].read == ("staged" if server.packs() else "installed")
        assert server.answer() == fresh
    publishes(server, base, "back")
    assert server.answer() == before
