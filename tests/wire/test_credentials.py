"""Credentials: the secret is shown to nobody, made once, and refused where others could reach it."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path

import pytest
import zmq

from liveweight.errors import CredentialsUnsafe, Unavailable
from liveweight.wire.credentials import (
    Secret,
    client_keys,
    load_or_create_secret,
    server_keys,
    socket_directory,
)
from tests.support.wire import OTHER_SECRET, SECRET, leaving_nothing


def test_a_secret_is_never_shown() -> None:
    for text in (repr(SECRET), str(SECRET), f"{SECRET}", repr([SECRET]), repr(server_keys(SECRET))):
        assert "secret that" not in text
        assert server_keys(SECRET).private.decode() not in text


def test_a_secret_neither_changes_nor_travels_in_a_pickle() -> None:
    with pytest.raises(AttributeError):
        SECRET._value = b"x"
    for carry in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not to be pickled"):
            carry(SECRET)


def test_secrets_are_equal_when_their_bytes_are() -> None:
    assert Secret(b"x" * 32) == Secret(b"x" * 32)
    assert hash(Secret(b"x" * 32)) == hash(Secret(b"x" * 32))
    assert SECRET != OTHER_SECRET
    assert SECRET != "a secret"
    assert Secret.generate() != Secret.generate()


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_a_secret_of_a_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(CredentialsUnsafe, match=str(size)):
        Secret(b"x" * size)


def test_keys_follow_from_the_secret_and_differ_by_role() -> None:
    assert server_keys(SECRET) == server_keys(Secret(SECRET._bytes))
    publics = {
        keys(secret).public for keys in (server_keys, client_keys) for secret in (SECRET, OTHER_SECRET)
    }
    assert len(publics) == 4
    assert zmq.curve_public(server_keys(SECRET).private) == server_keys(SECRET).public


def test_derived_bytes_differ_by_label_and_by_where_parts_end() -> None:
    derived = [
        SECRET.derive("a"),
        SECRET.derive("b"),
        SECRET.derive("a", b""),
        SECRET.derive("a", b"", b""),
        SECRET.derive("a", b"xy", b"z"),
        SECRET.derive("a", b"x", b"yz"),
        SECRET.derive("a", b"xy\0z"),
    ]
    assert len(set(derived)) == len(derived)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_an_absent_file_is_created_private_and_read_again(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "keys" / "secret"
    path.parent.mkdir()
    before = os.umask(umask)
    try:
        with leaving_nothing():
            secret = load_or_create_secret(path)
    finally:
        os.umask(before)
    assert load_or_create_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_directories_on_the_way_to_a_secret_are_made_private(tmp_path: Path) -> None:
    load_or_create_secret(tmp_path / "new" / "secret")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_the_end_of_a_line_is_not_part_of_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"y" * 40 + b"\r\n")
    path.chmod(0o600)
    assert load_or_create_secret(path) == Secret(b"y" * 40)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o644, 0o666])
def test_a_file_that_others_could_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"y" * 40)
    path.chmod(mode)
    with leaving_nothing(), pytest.raises(CredentialsUnsafe, match=f"{mode:04o}"):
        load_or_create_secret(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    load_or_create_secret(path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(CredentialsUnsafe, match="not to 4242"):
        load_or_create_secret(path)
    with pytest.raises(CredentialsUnsafe, match="not to 4242"):
        socket_directory(tmp_path)


def test_a_link_is_refused_wherever_it_points(tmp_path: Path) -> None:
    load_or_create_secret(tmp_path / "real")
    for name, target in (("link", "real"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(CredentialsUnsafe, match="symbolic link"):
            load_or_create_secret(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir(mode=0o700)
    for name in ("pipe", "directory"):
        with leaving_nothing(), pytest.raises(CredentialsUnsafe, match="not a regular file"):
            load_or_create_secret(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"short\n", b"z" * 5000])
def test_a_file_with_no_usable_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CredentialsUnsafe, match="bytes"):
        load_or_create_secret(path)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="Not a directory"):
        load_or_create_secret(tmp_path / "file" / "secret")
    with pytest.raises(CredentialsUnsafe, match="no directory"):
        socket_directory(tmp_path / "file")


def test_a_socket_directory_is_made_private_and_must_stay_so(tmp_path: Path) -> None:
    path = tmp_path / "sockets"
    with leaving_nothing():
        assert socket_directory(path) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    socket_directory(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CredentialsUnsafe, match="symbolic link"):
        socket_directory(tmp_path / "link")
    path.chmod(0o750)
    with leaving_nothing(), pytest.raises(CredentialsUnsafe, match="0750"):
        socket_directory(path)
