"""The torture's modules, each alone: what is chosen, what a fault does to a process, and that leaks and torn tokens are found."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from liveweight.engine.init_model.checkpoint import init_model
from liveweight.engine.init_model.sizes import SIZES
from liveweight.lab.torture import leaks as leaking
from liveweight.lab.torture.fault_plan import MOMENTS, READING, Strike, strikes
from liveweight.lab.torture.faults import BITS, cut, flip
from liveweight.lab.torture.fork_server import Forked
from liveweight.lab.torture.leaks import Leaks
from liveweight.lab.torture.replay import PublishedContents, Replay, ReplayAnswer, torn_in_order
from liveweight.lab.torture.torture import TortureResult
from liveweight.spec.deadline import Deadline
from liveweight.transports.ipc.arena import SharedArena

WITHIN_S = 60.0


def first(count: int, seed: int) -> list[Strike]:
    return list(itertools.islice(strikes(seed), count))


def test_the_same_seed_gives_the_same_strikes_and_another_gives_others() -> None:
    assert first(50, 1) == first(50, 1)
    assert first(50, 1) != first(50, 2)


def test_every_kind_meets_everyone_at_every_moment() -> None:
    many = first(2000, 0)
    assert {strike.after for strike in many} == set(MOMENTS)
    assert {str(strike) for strike in many} == {
        *("kill trainer", "kill rank", "stop trainer", "stop rank"),
        *("corrupt trainer", "cut trainer", "cut rank"),
    }
    assert {strike.offer for strike in many} == {"frozen", "live", "ring"}
    assert any(strike.stop_s is None for strike in many if strike.kind == "stop")


def test_bytes_are_corrupted_only_where_a_digest_is_compared() -> None:
    corrupted = [strike for strike in first(2000, 0) if strike.kind == "corrupt"]
    assert all(strike.verify and strike.offer != "live" for strike in corrupted)
    assert {strike.after for strike in corrupted} == set(READING)


@pytest.fixture
def arenas() -> tuple[SharedArena, SharedArena]:
    return SharedArena(4096), SharedArena(8192)


def test_a_bit_is_flipped_in_what_others_read_and_not_in_the_parameters(
    arenas: tuple[SharedArena, SharedArena],
) -> None:
    spared, read = arenas
    assert flip(os.getpid(), 977, spared=spared.memory.address)
    assert not spared.memory.bytes().any()
    flipped = [bin(byte).count("1") for byte in read.memory.bytes() if byte]
    assert 0 < sum(flipped) <= BITS
    read.close()
    assert not flip(os.getpid(), 1, spared=spared.memory.address), "nothing is left to flip"
    spared.close()


CONNECTED = """
import socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect(sys.argv[1])
    own = socket.socketpair()
    print("connected", flush=True)
    print(repr(end.recv(1)), flush=True)
    print(repr(own[0].send(b"1")), flush=True)
"""


def test_a_connection_is_cut_and_a_programs_own_pairs_are_not(short_path: Path) -> None:
    path = str(short_path / "peer.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        started = subprocess.Popen(
            [sys.executable, "-c", CONNECTED, path],
            stdout=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        with started, listener.accept()[0] as accepted:
            assert started.stdout is not None
            assert started.stdout.readline() == "connected\n"
            assert cut(started.pid, 0)
            assert select.select([accepted], [], [], WITHIN_S)[0]
            assert accepted.recv(1) == b""
            assert started.stdout.read().split() == ["b''", "1"]


def test_growth_is_a_leak_and_what_is_steady_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaking, "DESCRIPTORS", 2)
    monkeypatch.setattr(leaking, "SETTLE_S", 0.1)
    leaks, names = Leaks(), {os.getpid(): "me"}
    leaks.check(names)
    leaks.check(names)
    assert leaks.found == []
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
    leaks.check(names)
    for descriptor in opened:
        os.close(descriptor)
    assert len(leaks.found) == 1
    assert "descriptors became" in leaks.found[0]
    assert "/dev/null" in leaks.found[0]


def test_what_is_given_back_within_a_while_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaking, "DESCRIPTORS", 2)
    leaks, names = Leaks(), {os.getpid(): "me"}
    leaks.check(names)
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
    weigh = leaking.resources_of

    def given_back(pid: int) -> dict[str, int] | None:
        found = weigh(pid)
        while opened:  # after the first look
            os.close(opened.pop())
        return found

    monkeypatch.setattr(leaking, "resources_of", given_back)
    leaks.check(names)
    assert leaks.found == []


def test_a_process_and_a_file_that_stay_are_leaks(tmp_path: Path) -> None:
    (tmp_path / "engine.sock").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        forked, leaks = Forked(started.pid), Leaks()
        leaks.check_after([forked], [tmp_path / "engine.sock", tmp_path / "gone.sock"])
        assert len(leaks.found) == 2
        forked.send(signal.SIGKILL)
        forked.wait(WITHIN_S)
        assert forked.poll() == 0
        forked.kill()  # of one that has ended, nothing


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> PublishedContents:
    directories = [tmp_path_factory.mktemp("contents") / str(seed) for seed in range(2)]
    for seed, directory in enumerate(directories):
        init_model(directory, SIZES["qwen3"]["tiny"], seed=seed)
    return PublishedContents(directories)


def greedy(versions: PublishedContents, number: int, prompt: list[int], count: int) -> list[int]:
    from liveweight.lab.torn_demo.judge import loaded, logits

    model, tokens = loaded(versions.directories[number]), list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("attributed", [True, False])
def test_only_tokens_that_their_version_would_not_have_drawn_are_torn(
    versions: PublishedContents, attributed: bool
) -> None:
    prompt = [5, 6, 7]
    tokens = greedy(versions, 1, prompt, 6)
    elsewhere = [(token + 1) % 500 for token in tokens]
    with Replay(versions, attributed=attributed) as replay:
        replay.put(ReplayAnswer(prompt, tokens, ["3@1@x"] * 6))  # the label's content is that of its number
        replay.put(ReplayAnswer(prompt, tokens, ["initial@@y"] * 6))
        replay.put(ReplayAnswer(prompt, elsewhere, ["3@1@x"] * 6))
        replay.put(ReplayAnswer(prompt))
        replay.finish(Deadline.after(WITHIN_S))
    assert replay.tokens == 18
    wrong_name, wrong_token = 6 if attributed else 0, 6
    assert wrong_token - 2 <= replay.torn <= wrong_name + wrong_token
    assert (replay.torn > wrong_token) == attributed


@pytest.mark.parametrize(
    ("first", "last", "since", "contents"),
    [
        ("5", "5", 0, (2,)),
        ("5", "7", 0, (2, 0, 1)),
        ("default", "default", 0, (0,)),
        ("default", "2", 0, (0, 1, 2)),
        ("default", "default", 7, (0,)),  # started again after the seventh
        ("default", "9", 7, (0, 2, 0)),
        ("8", "9", 7, (2, 0)),
    ],
)
def test_what_may_have_served_an_answer_lies_between_its_admission_and_its_end(
    first: str, last: str, since: int, contents: tuple[int, ...]
) -> None:
    assert PublishedContents([Path("a"), Path("b"), Path("c")]).between(first, last, since=since) == contents


@pytest.mark.parametrize(
    ("drawn", "torn"),
    [
        (["111111"], 0),
        (["111000", "000111"], 0),  # one commit in the middle
        (["000111", "111000"], 3),  # the new version first, then the old one
        (["110000", "000000", "000011"], 2),  # two tokens that none of them explains
        (["110000", "001100", "000011"], 0),  # two commits
        (["101010", "010101"], 2),  # back and forth is no order
    ],
)
def test_tokens_of_an_answer_are_explained_by_versions_that_follow_each_other(
    drawn: list[str], torn: int
) -> None:
    assert torn_in_order([[bit == "1" for bit in row] for row in drawn]) == torn


def test_an_answer_that_crossed_a_commit_is_whole_and_one_that_went_back_is_torn(
    versions: PublishedContents,
) -> None:
    prompt = [5, 6, 7]
    before = greedy(versions, 0, prompt, 4)
    after = greedy(versions, 1, [*prompt, *before], 4)
    again = greedy(versions, 0, [*prompt, *before, *after], 4)
    with Replay(versions, attributed=True) as replay:
        replay.put(ReplayAnswer(prompt, before + after, served=(0, 1)))
        replay.put(ReplayAnswer(prompt, before + after, served=(0, 1, 0, 1)))
        replay.finish(Deadline.after(WITHIN_S))
    assert (replay.tokens, replay.torn) == (16, 0)
    with Replay(versions, attributed=True) as replay:
        replay.put(ReplayAnswer(prompt, before + after, served=(0,)))
        replay.finish(Deadline.after(WITHIN_S))
    assert replay.torn >= 3, "the new version's tokens, in an answer that says it was served by the old one"
    with Replay(versions, attributed=True) as replay:
        replay.put(ReplayAnswer(prompt, before + after + again, served=(0, 1)))
        replay.finish(Deadline.after(WITHIN_S))
    assert replay.torn >= 3


def result(**fields: object) -> TortureResult:
    counts = dict.fromkeys(
        (
            "kills",
            "seed",
            "torn_tokens",
            "late_waits",
            "leaks",
            "lost",
            "requests_failed",
            "restarts",
            "missed",
        ),
        0,
    )
    whole = {"target": "embedded", **counts, "rounds": 9, "committed": 5, "tokens": 100, "took_s": 1.0}
    return TortureResult(**{**whole, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["torn_tokens", "late_waits", "leaks", "lost"])
def test_one_of_anything_is_too_much(what: str) -> None:
    assert result().holds
    assert not result(**{what: 1}).holds


def test_an_engine_that_was_never_updated_or_asked_proves_nothing() -> None:
    assert not result(committed=0).holds
    assert not result(tokens=0).holds


def test_a_detector_that_finds_nothing_in_place_is_broken() -> None:
    assert result(target="in-place", torn_tokens=3).holds
    assert not result(target="in-place").holds
