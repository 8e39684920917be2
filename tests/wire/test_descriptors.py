"""Descriptors between real processes: shared files, refusals, and nothing left open whatever happens."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from liveweight.errors import (
    ChannelClosed,
    CredentialsUnsafe,
    MessageInvalid,
    Unavailable,
    WrongSecret,
    WrongState,
)
from liveweight.wire import descriptor_proof, descriptor_server, descriptors
from liveweight.wire.descriptor_server import DescriptorServer
from liveweight.wire.descriptors import fetch
from tests.support.wire import (
    OTHER_SECRET,
    SECRET,
    leaving_nothing,
    memory,
    next_message,
    process,
    soon,
    wait_until,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "descriptors"


@pytest.fixture
def server(path: Path) -> Iterator[DescriptorServer]:
    with leaving_nothing(), DescriptorServer(path, SECRET) as serving:
        yield serving


def write_into(pipe: Connection, path: Path) -> None:
    """A child that writes into the descriptors that it fetched."""
    one, two = fetch(path, SECRET, b"pair", soon())
    os.pwrite(one, b"from the child", 0)
    pipe.send(os.pread(two, 100, 0))
    pipe.recv()


def test_memory_is_shared_between_processes(server: DescriptorServer) -> None:
    with memory() as one, memory(b"from the parent") as two:
        server.register(b"pair", [one, two])
        with process(write_into, server.path) as (_, pipe):
            assert next_message(pipe) == b"from the parent"
            assert os.pread(one, 100, 0) == b"from the child"


def test_fetched_descriptors_close_on_exec_and_are_the_callers(server: DescriptorServer) -> None:
    with memory(b"content") as original:
        server.register(b"t", [original] * 64)
    fetched = fetch(server.path, SECRET, b"t", soon())
    server.withdraw(b"t")
    assert len(set(fetched)) == 64
    for descriptor in fetched:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert os.pread(descriptor, 10, 0) == b"content"
        os.close(descriptor)


def test_what_was_withdrawn_or_never_registered_is_not_handed_out(server: DescriptorServer) -> None:
    with memory() as held:
        server.register(b"t", [held])
        server.withdraw(b"t")
        server.withdraw(b"t")
        for token in (b"t", b"never", b"\0" * 64):
            with pytest.raises(WrongState, match=token.hex()):
                fetch(server.path, SECRET, token, soon())


@pytest.mark.parametrize("token", [b"", b"x" * 65])
def test_a_token_of_a_wrong_length_is_refused_on_both_sides(server: DescriptorServer, token: bytes) -> None:
    with memory() as held, pytest.raises(MessageInvalid, match=str(len(token))):
        server.register(token, [held])
    with pytest.raises(MessageInvalid, match=str(len(token))):
        fetch(server.path, SECRET, token, soon())


def test_a_registration_that_cannot_be_is_refused_and_holds_nothing(server: DescriptorServer) -> None:
    with memory() as held:
        server.register(b"t", [held])
        with leaving_nothing():
            for token, wrong in ((b"t", [held]), (b"u", []), (b"u", [held] * 65)):
                with pytest.raises(ValueError):
                    server.register(token, wrong)
            with pytest.raises(OSError):
                server.register(b"u", [held, held, 99_999])


def test_a_wrong_secret_gets_nothing(server: DescriptorServer) -> None:
    with memory() as held, leaving_nothing():
        server.register(b"t", [held])
        with pytest.raises(WrongSecret, match="does not accept"):
            fetch(server.path, OTHER_SECRET, b"t", soon())
        wait_until("the refusal to be counted", lambda: server.refused == 1)
        assert isinstance(server.last_refusal, WrongSecret)
        server.withdraw(b"t")
        server.register(b"t", [held])
        server.withdraw(b"t")


def test_another_user_is_refused_before_a_word(
    server: DescriptorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptor_server, "peer_user", lambda _: 4242)
    with pytest.raises(ChannelClosed):
        fetch(server.path, SECRET, b"t", soon())
    assert "4242" in str(server.last_refusal)
    monkeypatch.setattr(descriptors, "peer_user", lambda _: 4243)
    with pytest.raises(WrongSecret, match="another user"):
        fetch(server.path, SECRET, b"t", soon())


def test_where_nobody_serves_the_answer_is_prompt(path: Path) -> None:
    with leaving_nothing(), pytest.raises(ChannelClosed, match="nobody serves"):
        fetch(path, SECRET, b"t", soon(60))
    with pytest.raises(Unavailable):
        fetch(path.with_name("x" * 200), SECRET, b"t", soon(60))


def test_a_receiver_without_room_for_descriptors_keeps_none(server: DescriptorServer) -> None:
    with memory() as held:
        server.register(b"t", [held] * 64)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with leaving_nothing():
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 20, hard))
            try:
                with pytest.raises(MessageInvalid, match="more descriptors"):
                    fetch(server.path, SECRET, b"t", soon())
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.withdraw(b"t")


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(str(path))
    return client


def test_a_server_without_descriptors_to_accept_with_recovers(server: DescriptorServer) -> None:
    with memory() as held:
        server.register(b"t", [held])
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            client.connect(str(server.path))
            began = time.process_time()
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
            assert time.process_time() - began < 0.3  # it does not spin
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(10)
        assert client.recv(100).startswith(descriptor_proof.MAGIC)
        client.close()
        os.close(*fetch(server.path, SECRET, b"t", soon()))
        server.withdraw(b"t")


def fetch_many(pipe: Connection, path: Path) -> None:
    for _ in range(200):
        os.close(*fetch(path, SECRET, b"t", soon()))
    pipe.send("done")


def test_processes_fetch_at_once_while_others_register_and_withdraw(server: DescriptorServer) -> None:
    with memory() as held:
        server.register(b"t", [held])
        with process(fetch_many, server.path) as (_, one), process(fetch_many, server.path) as (_, two):
            for n in range(500):
                server.register(b"u%d" % n, [held])
                server.withdraw(b"u%d" % n)
            assert next_message(one) == next_message(two) == "done"
        server.withdraw(b"t")
        assert server.refused == 0


def serve_forever(pipe: Connection, path: Path) -> None:
    with DescriptorServer(path, SECRET):
        pipe.send("ready")
        pipe.recv()


def test_what_a_killed_server_left_is_replaced_and_a_living_one_is_not(path: Path) -> None:
    with process(serve_forever, path) as (child, pipe):
        assert next_message(pipe) == "ready"
        with leaving_nothing(), pytest.raises(Unavailable, match="another process"):
            DescriptorServer(path, SECRET)
        child.kill()
        child.join()
    assert path.is_socket()
    with leaving_nothing(), DescriptorServer(path, SECRET):
        pass
    assert not path.exists()


def test_a_server_needs_a_private_directory_and_takes_no_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with leaving_nothing():
        with pytest.raises(CredentialsUnsafe):
            DescriptorServer(tmp_path / "open" / "socket", SECRET)
        with pytest.raises(Unavailable):
            DescriptorServer(tmp_path / "file", SECRET)
        with pytest.raises(Unavailable):
            DescriptorServer(tmp_path / ("x" * 200), SECRET)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_closed_server_holds_nothing_and_says_so(path: Path) -> None:
    with memory() as held, leaving_nothing():
        server = DescriptorServer(path, SECRET)
        server.register(b"t", [held])
        client = raw(path)
        server.close()
        server.close()
        client.close()
        with pytest.raises(ChannelClosed, match="was closed"):
            server.register(b"u", [held])
        with pytest.raises(ChannelClosed):
            fetch(path, SECRET, b"t", soon())
