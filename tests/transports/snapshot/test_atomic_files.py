"""Files that are synced while the next is written: each is synced before it has its name, and none that failed is left behind."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from liveweight.errors import OutOfSpace
from liveweight.transports.snapshot.disk.atomic_files import FileSync, write_all, written
from tests.support.wire import leaving_nothing, wait_until


def put(path: Path, sync: FileSync) -> None:
    with written(path, durable=True, sync=sync) as descriptor:
        write_all(descriptor, memoryview(path.name.encode()))


def failing_sync(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """The disk fails at that sync, counted from 1."""
    real, count = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        count[0] += 1
        if count[0] == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_the_next_is_written_while_one_is_synced_and_none_has_its_name_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def fsync(_: int) -> None:
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(os, "fsync", fsync)
    with FileSync() as sync:
        put(tmp_path / "first", sync)
        assert begun.wait(60)
        with written(tmp_path / "second", durable=True, sync=sync) as descriptor:
            write_all(descriptor, memoryview(b"second"))
            assert not (tmp_path / "first").exists()
            go.set()
            wait_until("the first has its name", (tmp_path / "first").exists)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "first": "first",
        "second": "second",
    }


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_sync_that_fails_is_raised_and_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    failing_sync(monkeypatch, bad)
    named = pytest.raises(OutOfSpace, match=f"part{bad} could not be written")
    with leaving_nothing(), named, FileSync() as sync:
        for number in (1, 2, 3):
            put(tmp_path / f"part{number}", sync)
    assert f"part{bad}" not in {path.name for path in tmp_path.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_error_while_the_next_is_written_waits_for_the_one_before(tmp_path: Path) -> None:
    with leaving_nothing(), pytest.raises(ValueError, match="given up"), FileSync() as sync:
        put(tmp_path / "first", sync)
        with written(tmp_path / "second", durable=True, sync=sync):
            raise ValueError("given up")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
