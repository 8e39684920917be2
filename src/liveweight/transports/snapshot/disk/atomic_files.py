"""Files that are there whole or not at all, and locks on them.

Owns the order that makes it so: a temporary file, fsync, rename, fsync of the directory. What is in the files is in format.py.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from liveweight.errors import OutOfSpace, SnapshotDamaged

TEMPORARY = ".tmp-"
# Not os.posix_fallocate, which writes a byte into every block where the file system does not know how.
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class FileSync:
    """Syncs files that were written and gives them their names, in a thread of its own: one of them, while the next is written.

    Used by one thread. Leaving the `with` block waits for the last file and raises its error.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="liveweight-file-sync")
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Start this work, and wait for the work that was submitted before; raises its error."""
        before, self._last = self._last, self._thread.submit(work)
        if before is not None:
            before.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None and self._last is not None:
            self._last.result()


@contextmanager
def written(path: Path, *, durable: bool, sync: FileSync | None = None) -> Iterator[int]:
    """A descriptor to write to; at the end the file gets its name; with `sync`, soon after. If anything is raised, no part of the
    file is left."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}-{path.name}")

    def finish() -> None:
        with _removed_on_error(temporary, path):
            try:
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)

    with _removed_on_error(temporary, path):
        descriptor = os.open(temporary, _FLAGS, 0o644)
        try:
            yield descriptor
        except BaseException:
            os.close(descriptor)
            raise
    if sync is None:
        finish()
    else:
        sync.submit(finish)


@contextmanager
def _removed_on_error(temporary: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise out_of_space(path, error) from error
        raise


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """A small file, whole or not at all."""
    with written(path, durable=durable) as descriptor:
        write_all(descriptor, memoryview(data))


def write_all(descriptor: int, data: memoryview) -> None:
    """All of it; OSError where that cannot be."""
    while data:
        data = data[os.write(descriptor, data) :]


def reserve(descriptor: int, size_bytes: int) -> None:
    """Reserve a file's space: a full disk fails here, before anything is written, and the file lies in one piece. Does nothing on a file
    system that cannot reserve space."""
    if _fallocate(descriptor, 0, 0, size_bytes) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        raise OSError(number, os.strerror(number))


def begin_writing(descriptor: int, size_bytes: int) -> None:
    """Let the disk begin with the last bytes that were written, while more are made ready: less is left for fsync to wait for. A hint."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    _sync_file_range(descriptor, end - size_bytes, size_bytes, _BEGIN_WRITING)


def read_all(descriptor: int, into: memoryview, offset_bytes: int) -> int:
    """Fill `into` from there on; how many bytes there were, which are fewer only at the file's end."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset_bytes + done)
        if count == 0:
            break
        done += count
    return done


def sync_directory(path: Path) -> None:
    """Let the names in a directory survive a crash of the machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise out_of_space(path, error) from error


def open_locked(path: Path, *, exclusive: bool) -> int | None:
    """A descriptor of that file with a lock on it; None where somebody holds one that excludes ours. FileNotFoundError as it comes.

    The lock is gone with the descriptor, however its process ends. A file that was removed meanwhile is not found.
    """
    descriptor = os.open(path, (os.O_RDWR if exclusive else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        removed = os.fstat(descriptor).st_nlink == 0
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    if removed:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(path))
    return descriptor


def read_small(path: Path) -> bytes:
    """A manifest or commit file; SnapshotDamaged where it is missing."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SnapshotDamaged(str(path.parent), [f"{path.name} missing: {error.strerror}"]) from error


def out_of_space(path: Path, error: OSError) -> OutOfSpace:
    """The error for a file that could not be written."""
    return OutOfSpace(f"{path} could not be written: {error.strerror or error}")
