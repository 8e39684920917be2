"""A store: the directory that holds snapshots, one directory each. Begins, lists and prunes them.

Owns which of them exist: those with a commit file. A snapshot being written, or being read, is locked, and is never removed; a process that
dies releases its locks. Several processes may use a store at once.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from liveweight.errors import LayoutInvalid, SnapshotNotFound, WrongState
from liveweight.transports.snapshot.disk.atomic_files import TEMPORARY, open_locked, out_of_space
from liveweight.transports.snapshot.disk.format import CommitFile, decode_commit
from liveweight.transports.snapshot.disk.names import COMMIT, WRITING, directory_name, sequence_of
from liveweight.transports.snapshot.disk.snapshot_draft import SnapshotDraft

_AGAIN = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)
"""Another process took the sequence number, or pruned meanwhile."""
_TRIES = 100
_DISCARDED = ".old-"
"""What directories are called while they are removed."""
_FRESH_S = 60.0
"""A directory without a lock may be one that was made a moment ago: it is left alone so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A directory of the store: `commit` is None for one that is not complete."""

    path: Path
    commit: CommitFile | None
    writing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """What was removed, and what was kept because it is in use."""

    removed: tuple[Path, ...]
    in_use: tuple[Path, ...]


class Store:
    """Snapshots below one directory, which is made if it is not there. Any thread, any process."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, label: str) -> SnapshotDraft:
        """A new, empty snapshot, behind all that are there. OutOfSpace where its directory cannot be made."""
        for left in reversed(range(_TRIES)):
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                return self._begin(label)
            except OSError as error:
                if error.errno not in _AGAIN or not left:
                    raise out_of_space(self.root, error) from error
        raise WrongState("without a try left", "beginning a snapshot")

    def _begin(self, label: str) -> SnapshotDraft:
        """Made under another name, locked, and only then moved to its own: nobody finds it unlocked."""
        temporary, lock = self.root / f"{TEMPORARY}{secrets.token_hex(8)}", None
        try:
            temporary.mkdir()
            (temporary / WRITING).touch()
            lock = open_locked(temporary / WRITING, exclusive=True)
            path = self.root / directory_name(self._next_sequence(), label)
            if lock is not None:
                temporary.rename(path)  # fails if another process writes there: its directory is not empty
                return SnapshotDraft(path, lock)
        except BaseException:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        raise FileExistsError(errno.EEXIST, "a pruner is checking whether it is abandoned", str(temporary))

    def listed(self) -> list[StoredSnapshot]:
        """Every snapshot, complete or not, the oldest first. SnapshotDamaged names a commit file that cannot be read."""
        return [_listed(path) for path in self._directories()]

    def complete(self) -> list[Path]:
        """The directories of complete snapshots, the oldest first."""
        return [path for path in self._directories() if _committed(path)]

    def newest(self) -> Path:
        """The directory of the newest complete snapshot; SnapshotNotFound names the incomplete ones that are there."""
        complete = self.complete()
        if not complete:
            places = [f"{path} (not complete)" for path in self._directories()] or [str(self.root)]
            raise SnapshotNotFound("no complete snapshot", places)
        return complete[-1]

    def prune(self, keep: int) -> PruneResult:
        """Remove all complete snapshots but the newest `keep`, and what writers that died left behind. None that is in use."""
        if keep < 1:
            raise LayoutInvalid(f"keeping the last {keep} snapshots would leave none")
        paths = self._directories()
        complete = [path for path in paths if _committed(path)]
        abandoned = [path for path in paths if path not in complete]
        removed, in_use = list[Path](), list[Path]()
        for path in complete[:-keep]:
            (removed if _remove(path, COMMIT) else in_use).append(path)
        for path in self.root.glob(f"{_DISCARDED}*"):
            shutil.rmtree(path, ignore_errors=True)
        temporary = self.root.glob(f"{TEMPORARY}*")
        removed += [path for path in [*abandoned, *temporary] if _remove(path, WRITING)]
        return PruneResult(removed=tuple(removed), in_use=tuple(in_use))

    def _directories(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        found = [(sequence_of(path.name), path) for path in self.root.iterdir() if path.is_dir()]
        return [path for _, path in sorted((number, path) for number, path in found if number is not None)]

    def _next_sequence(self) -> int:
        paths = self._directories()
        return 1 + (sequence_of(paths[-1].name) or 0) if paths else 1


def _listed(path: Path) -> StoredSnapshot:
    try:
        data = (path / COMMIT).read_bytes()
    except OSError:
        return StoredSnapshot(path=path, commit=None, writing=_is_written(path))
    return StoredSnapshot(path=path, commit=decode_commit(data, str(path / COMMIT)), writing=False)


def _is_written(path: Path) -> bool:
    try:
        lock = open_locked(path / WRITING, exclusive=False)
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is None


def _remove(path: Path, lock_file: str) -> bool:
    """Remove a snapshot that nobody holds, all of it at once. Whether it is gone.

    A writer locks before its directory has its name, and unlocks only after its commit file is there; a reader locks the commit file.
    """
    try:
        lock = open_locked(path / lock_file, exclusive=True)
    except FileNotFoundError:
        if _committed(path) or _is_fresh(path):
            return False
        _discard(path)
        return True
    except OSError as error:
        raise out_of_space(path, error) from error
    if lock is None:
        return False
    try:
        if lock_file == WRITING and _committed(path):
            return False  # just now
        _discard(path)
    finally:
        os.close(lock)
    return True


def _discard(path: Path) -> None:
    """Rename the directory first: the snapshot is gone at once, and the next `prune` removes the rest if this process dies here."""
    discarded = path.with_name(f"{_DISCARDED}{secrets.token_hex(8)}")
    try:
        path.rename(discarded)
    except FileNotFoundError:
        return  # another pruner was faster
    except OSError as error:
        raise out_of_space(path, error) from error
    shutil.rmtree(discarded, ignore_errors=True)


def _committed(path: Path) -> bool:
    return (path / COMMIT).is_file()


def _is_fresh(path: Path) -> bool:
    """Whether a directory was made or changed a moment ago; one that is gone was not."""
    try:
        return time.time() - path.stat().st_mtime < _FRESH_S
    except OSError:
        return False
