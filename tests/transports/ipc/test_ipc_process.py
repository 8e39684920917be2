"""Shared memory between real processes: killed, stopped, limited, lied to.

The children are this file, run as a program with a role; they take and give lines of JSON.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from liveweight.devices.cpu import Allocation, allocate
from liveweight.devices.kernels import choose_kernels
from liveweight.errors import (
    ChannelClosed,
    DeadlineExceeded,
    LiveWeightError,
    MessageInvalid,
    MessageTooLarge,
    OfferChanged,
    OutOfMemory,
)
from liveweight.spec.deadline import Deadline
from liveweight.spec.dtype import DType
from liveweight.spec.layout import Layout, packed
from liveweight.spec.manifest import TensorSpec
from liveweight.transports.ipc.arena import SharedArena
from liveweight.transports.ipc.reader import IpcReader
from liveweight.transports.ipc.source import IpcSource
from liveweight.transports.port import Reading
from liveweight.wire.channel import Channel
from liveweight.wire.codec import Codec
from liveweight.wire.credentials import Secret
from liveweight.wire.descriptors import fetch
from liveweight.wire.limits import WireLimits
from liveweight.wire.messages import Attach, Attached, GetReplicaState, Message, Refusal
from liveweight.wire.messages.values import Offer
from tests.arch.source_tree import ROOT
from tests.support.processes.stopping import stop
from tests.support.wire import soon, wait_until

SECRET = Secret(b"a secret that is only used by tests")
ARENA = "memfd:liveweight"
LARGE = 256 << 20


def layout() -> Layout:
    """Some megabytes, in pieces."""
    specs = [TensorSpec(name=f"w{i}", dtype=DType.BFLOAT16, shape=(1024, 512)) for i in range(9)]
    return packed(specs)


def content(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, layout().memories_bytes[0], dtype=np.uint8)


def hashed(data: object) -> str:
    return xxhash.xxh3_64_hexdigest(memoryview(data))  # type: ignore[arg-type]


def read_all(reading: Reading) -> None:
    reading.check()
    reading.read(0, len(reading.rows))
    reading.check()


# The children.


def send(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def received() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def rank(_: str) -> None:
    """Reads every offer that it receives into its shadow, and sends what lies there."""
    with IpcReader(SECRET, choose_kernels()) as reader, allocate(layout().memories_bytes[0]) as shadow:
        for order in received():
            offer = msgspec.json.decode(order["offer"], type=Offer)
            try:
                read_all(reader.bind(offer, layout(), [shadow.memory], soon()))
            except LiveWeightError as error:
                send(code=error.code)
            else:
                send(hashed=hashed(shadow.memory.bytes()), requests=reader.requests)


def source(argument: str) -> None:
    """Offers an arena under a fixed name, and then anew with every seed that it receives."""
    directory, name, seed = argument.split(",")
    size = layout().memories_bytes[0]
    with (
        IpcSource(Path(directory), SECRET, name=name) as transport_source,
        transport_source.allocate(size) as arena,
    ):
        for number in itertools.chain([int(seed)], (order["seed"] for order in received())):
            arena.raise_generation()
            arena.memory.bytes()[:] = content(number)
            offer = transport_source.offer(layout(), [arena], "frozen")
            inode = os.fstat(arena.descriptor).st_ino
            send(offer=msgspec.json.encode(offer).decode(), inode=inode)


def intruder(address: str) -> None:
    """Holds the secret and gets the descriptor, but wants to write."""
    codec: Codec[Message] = Codec(Message)
    with Channel(address, SECRET, codec, deadline=soon()) as channel:
        attached = channel.request(Attach(layout=layout().fingerprint, kind="live"), soon(), "an answer")
    if not isinstance(attached, Attached):
        raise TypeError(attached)
    (descriptor,) = fetch(Path(attached.descriptors), SECRET, attached.memories[0], soon())
    errors = []
    for protection in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
        try:
            mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, protection)
        except OSError as error:
            errors.append(error.errno)
    try:
        os.pwrite(descriptor, b"\0" * 8, 24)  # the generation
    except OSError as error:
        errors.append(error.errno)
    send(errors=errors)


def limited(_: str) -> None:
    """Allocates more than its limit on address space allows."""
    allocate(1 << 20).close()
    SharedArena(1 << 20).close()
    before = held()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGE // 4, resource.RLIM_INFINITY))
    codes = []
    for attempt in (allocate, SharedArena):
        try:
            attempt(LARGE)
        except OutOfMemory as error:
            codes.append([error.code, str(LARGE) in str(error)])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = held()
    SharedArena(LARGE).close()
    send(codes=codes, before=before, after=after)


def tidy(directory: str) -> None:
    """Both halves, twice, and what they left. (A thread that was joined may take a moment more to leave the kernel's list.)"""
    before = held(Path(directory))
    for _ in range(2):
        rounds(Path(directory))
    with suppress(DeadlineExceeded):
        wait_until("all to be gone", lambda: held(Path(directory)) == before)
    send(before=before, after=held(Path(directory)))


def rounds(directory: Path) -> None:
    size = layout().memories_bytes[0]
    with ExitStack() as stack:
        transport_source = stack.enter_context(IpcSource(directory, SECRET))
        arena = transport_source.allocate(size)
        stack.callback(arena.close)
        one, other = (stack.enter_context(allocate(size)) for _ in range(2))
        reader = stack.enter_context(IpcReader(SECRET, choose_kernels()))
        for seed, shadow in enumerate((one, other, one)):
            arena.raise_generation()
            arena.memory.bytes()[:] = content(seed)
            offer = transport_source.offer(layout(), [arena], "live")
            read_all(reader.bind(offer, layout(), [shadow.memory], soon()))


def held(directory: Path | None = None) -> dict[str, object]:
    """What this process has open, mapped and running."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    large = [line for line in maps if size_of(line) >= (1 << 20) and line.split()[1].endswith("s")]
    return {
        "descriptors": sorted(path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()),
        "arenas": sum(ARENA in line for line in maps),
        "shared": len(large),
        "threads": [thread.name for thread in threading.enumerate()],
        "tasks": len(list(Path("/proc/self/task").iterdir())),
        "files": [] if directory is None else sorted(path.name for path in directory.iterdir()),
    }


def size_of(line: str) -> int:
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    return end - start


ROLES = {role.__name__: role for role in (rank, source, intruder, limited, tidy)}


# The tests.


class Child:
    """One of the roles in a process of its own."""

    def __init__(self, role: str, argument: object = "") -> None:
        command = [sys.executable, "-m", "tests.transports.ipc.test_ipc_process", role, str(argument)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={"PYTHONPATH": path},
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        assert ready, "the child sent nothing"
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait(20)}"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def ask(self, **order: object) -> dict[str, Any]:
        self.send(**order)
        return self.receive()

    def end(self) -> int:
        """Let it finish; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


@contextmanager
def child(role: str, argument: object = "") -> Iterator[Child]:
    one = Child(role, argument)
    try:
        yield one
    finally:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lw-") as name:
        yield Path(name)


@pytest.fixture
def shadow() -> Iterator[Allocation]:
    with allocate(layout().memories_bytes[0]) as allocation:
        yield allocation


@pytest.fixture
def reader() -> Iterator[IpcReader]:
    with IpcReader(SECRET, choose_kernels()) as one:
        yield one


def offer_in(facts: dict[str, Any]) -> Offer:
    return msgspec.json.decode(facts["offer"], type=Offer)


def holders(inode: int) -> set[int]:
    """The processes that map that arena or have it open."""
    running = [process for process in Path("/proc").iterdir() if process.name.isdecimal()]
    return {int(process.name) for process in running if holds(process, inode)}


def holds(process: Path, inode: int) -> bool:
    try:
        maps = (process / "maps").read_text(encoding="utf-8").splitlines()
        links = list((process / "fd").iterdir())
    except OSError:  # ended meanwhile, or not ours
        return False
    mapped = any(ARENA in line and line.split()[4] == str(inode) for line in maps)
    return mapped or any(opens(link, inode) for link in links)


def opens(link: Path, inode: int) -> bool:
    try:
        return link.stat().st_ino == inode and ARENA in str(link.readlink())
    except OSError:
        return False


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_in_other_processes_read_every_round_and_attach_once(directory: Path, ranks: int) -> None:
    with ExitStack() as stack:
        transport_source = stack.enter_context(IpcSource(directory, SECRET))
        arena = transport_source.allocate(layout().memories_bytes[0])
        stack.callback(arena.close)
        children = [stack.enter_context(child("rank")) for _ in range(ranks)]
        for seed in range(4):
            arena.raise_generation()
            arena.memory.bytes()[:] = content(seed)
            offer = transport_source.offer(layout(), [arena], "frozen")
            for one in children:
                one.send(offer=msgspec.json.encode(offer).decode())
            for one in children:
                assert one.receive() == {"hashed": hashed(content(seed)), "requests": 1}
        assert [one.end() for one in children] == [0] * ranks


def test_a_killed_source_leaves_its_readers_whole_and_its_memory_to_the_last_of_them(
    directory: Path, reader: IpcReader, shadow: Allocation
) -> None:
    with child("source", f"{directory},s,5") as trainer:
        facts = trainer.receive()
        reading = reader.bind(offer_in(facts), layout(), [shadow.memory], soon())
        reading.read(0, 1)
        trainer.kill()
        assert holders(facts["inode"]) == {os.getpid()}
        read_all(reading)
        assert hashed(shadow.memory.bytes()) == hashed(content(5))
        reader.forget(offer_in(facts).source)
        assert holders(facts["inode"]) == {os.getpid()}
        del reading
        assert holders(facts["inode"]) == set()
        with pytest.raises(ChannelClosed, match="gone"):
            reader.bind(offer_in(facts), layout(), [shadow.memory], soon())


def test_a_source_that_begins_again_at_the_same_address_is_a_new_one(
    directory: Path, reader: IpcReader, shadow: Allocation
) -> None:
    old = None
    for seed in (1, 2, 3):
        with child("source", f"{directory},same,{seed}") as trainer:
            facts = trainer.receive()
            offer = offer_in(facts)
            read_all(reader.bind(offer, layout(), [shadow.memory], soon()))
            assert hashed(shadow.memory.bytes()) == hashed(content(seed))
            if old is not None:
                assert old.source == offer.source
                with pytest.raises(OfferChanged):
                    reader.bind(old, layout(), [shadow.memory], soon()).check()
            old = offer
            trainer.kill()
            assert holders(facts["inode"]) == {os.getpid()}


def test_memory_of_a_killed_source_is_let_go_when_another_one_is_attached_to(
    directory: Path, reader: IpcReader, shadow: Allocation
) -> None:
    inodes = []
    for name in ("a", "b"):
        with child("source", f"{directory},{name},1") as trainer:
            facts = trainer.receive()
            inodes.append(facts["inode"])
            read_all(reader.bind(offer_in(facts), layout(), [shadow.memory], soon()))
            trainer.kill()
    assert [holders(inode) for inode in inodes] == [set(), {os.getpid()}]


def test_a_stopped_source_ends_the_wait_at_the_deadline(
    directory: Path, reader: IpcReader, shadow: Allocation
) -> None:
    with child("source", f"{directory},s,5") as trainer:
        offer = offer_in(trainer.receive())
        stop(trainer.pid)
        with pytest.raises(DeadlineExceeded, match=offer.source):
            reader.bind(offer, layout(), [shadow.memory], Deadline.after(0.3))
        os.kill(trainer.pid, signal.SIGCONT)
        read_all(reader.bind(offer, layout(), [shadow.memory], soon()))
        assert hashed(shadow.memory.bytes()) == hashed(content(5))


def test_a_killed_rank_does_not_keep_others_from_reading(directory: Path) -> None:
    with ExitStack() as stack:
        trainer = stack.enter_context(child("source", f"{directory},s,5"))
        facts = trainer.receive()
        for _ in range(3):
            victim = stack.enter_context(child("rank"))
            assert victim.ask(offer=facts["offer"])["hashed"] == hashed(content(5))
            victim.kill()
        assert holders(facts["inode"]) == {trainer.pid}
        facts = trainer.ask(seed=6)
        survivor = stack.enter_context(child("rank"))
        assert survivor.ask(offer=facts["offer"])["hashed"] == hashed(content(6))


def test_a_rank_that_holds_the_descriptor_cannot_write(directory: Path) -> None:
    with (
        IpcSource(directory, SECRET) as transport_source,
        transport_source.allocate(layout().memories_bytes[0]) as arena,
    ):
        arena.memory.bytes()[:] = content(1)
        offer = transport_source.offer(layout(), [arena], "live")
        with child("intruder", transport_source.address) as one:
            assert one.receive() == {"errors": [1, 1, 1]}  # EPERM
        assert hashed(arena.memory.bytes()) == hashed(content(1))
        assert arena.generation == offer.generation


def test_an_allocation_beyond_the_limit_of_a_process_fails_whole() -> None:
    with child("limited") as one:
        facts = one.receive()
        assert facts["codes"] == [["LW-502", True], ["LW-502", True]]
        assert facts["before"] == facts["after"]
        assert one.end() == 0


def test_both_halves_leave_nothing(directory: Path) -> None:
    with child("tidy", directory) as one:
        facts = one.receive()
        assert facts["before"] == facts["after"]
        assert (facts["after"]["arenas"], facts["after"]["files"]) == (0, [])
        assert facts["after"]["threads"] == ["MainThread"]
        assert one.end() == 0


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64],
    ids=["nothing", "zeros", "another protocol", "all bytes"],
)
def test_garbage_on_either_socket_keeps_nobody_from_reading(
    directory: Path, reader: IpcReader, shadow: Allocation, garbage: bytes
) -> None:
    with child("source", f"{directory},s,5") as trainer, ExitStack() as stack:
        offer = offer_in(trainer.receive())
        paths = [path for path in directory.iterdir() if path.is_socket()]
        assert len(paths) == 2
        for path in paths:
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.connect(str(path))
            stranger.sendall(garbage)
        read_all(reader.bind(offer, layout(), [shadow.memory], soon()))
        assert hashed(shadow.memory.bytes()) == hashed(content(5))


def test_a_source_that_is_no_source_of_ours_is_refused(
    directory: Path, reader: IpcReader, shadow: Allocation
) -> None:
    path = directory / "other"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        offer = Offer(mode="ipc", kind="live", source=f"ipc://{path}", layout="0" * 32, generation=1)
        with pytest.raises(DeadlineExceeded, match="other"):
            reader.bind(offer, layout(), [shadow.memory], Deadline.after(0.3))


def test_a_message_that_a_source_does_not_answer_is_refused_by_name(directory: Path) -> None:
    codec: Codec[Message] = Codec(Message)
    with IpcSource(directory, SECRET) as transport_source:
        with Channel(transport_source.address, SECRET, codec, deadline=soon()) as channel:
            reply = channel.request(GetReplicaState(wait_s=0.0), soon(), "a refusal")
        assert isinstance(reply, Refusal)
        assert isinstance(reply.fault.to_error(), MessageInvalid)
        assert "GetReplicaState" in reply.fault.message


def test_a_layout_too_large_to_be_told_is_refused_at_the_source(directory: Path) -> None:
    small = WireLimits(message_bytes=500)
    with (
        IpcSource(directory, SECRET, limits=small) as transport_source,
        transport_source.allocate(layout().memories_bytes[0]) as arena,
    ):
        with pytest.raises(MessageTooLarge):
            transport_source.offer(layout(), [arena], "frozen")
        inode = os.fstat(arena.descriptor).st_ino
    assert holders(inode) == set()


def test_a_closed_arena_is_freed_once_its_layout_is_withdrawn(directory: Path) -> None:
    with IpcSource(directory, SECRET) as transport_source:
        arena = transport_source.allocate(layout().memories_bytes[0])
        transport_source.offer(layout(), [arena], "frozen")
        inode = os.fstat(arena.descriptor).st_ino
        arena.close()
        transport_source.withdraw(layout())
        wait_until("the arena's memory to be free", lambda: not holders(inode))


if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2])
