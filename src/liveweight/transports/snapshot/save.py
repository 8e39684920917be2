"""Saving: weights that this process holds, written as one snapshot; and work on a snapshot in a thread of its own.

With several processes, the leader of a replica begins a snapshot, every rank writes its own image (disk/writer), and the leader commits.
With one process, `save` does all of that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from liveweight.spec.deadline import Deadline
from liveweight.spec.manifest import Manifest, Version
from liveweight.transports.snapshot.disk.format import CommitFile
from liveweight.transports.snapshot.disk.store import Store
from liveweight.transports.snapshot.disk.writer import (
    Image,
    Progress,
    RankWriter,
    Stop,
    WriteSettings,
    WritingCancelled,
)

_Result = TypeVar("_Result")
Work: TypeAlias = Callable[[Stop, Progress], _Result]
"""The work of a Background: it calls Stop to learn whether to end, and Progress with the number of bytes that are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSnapshot:
    """A snapshot that exists."""

    path: Path
    commit: CommitFile


def save(
    store: Store,
    version: Version,
    images: Sequence[Image],
    *,
    settings: WriteSettings | None = None,
    expected: Manifest | None = None,
    stop: Stop = lambda: False,
    progress: Progress = lambda _: None,
) -> SavedSnapshot | WritingCancelled:
    """Write one image per rank, and commit (see SnapshotDraft.commit)."""
    settings = settings or WriteSettings()
    with store.begin(str(version.label)) as draft:
        for rank, image in enumerate(images):
            written = RankWriter(
                draft.path,
                image,
                snapshot=draft.snapshot,
                rank=rank,
                settings=settings,
                stop=stop,
                progress=progress,
            ).write()
            if isinstance(written, WritingCancelled):
                return written
        commit = draft.commit(version, ranks=len(images), expected=expected, durable=settings.durable)
        return SavedSnapshot(path=draft.path, commit=commit)


class Background(Generic[_Result]):
    """Work on a snapshot in a thread of its own. `cancel`, `wait` and the counts are for any other thread; ends with the `with`."""

    def __init__(self, work: Work[_Result], *, what: str, total_bytes: int) -> None:
        self._what, self.total_bytes, self.done_bytes = what, total_bytes, 0
        self._stop = threading.Event()
        self._result: list[_Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="liveweight-snapshot", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `wait` would answer at once."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Cancel the work; the result of `wait` shows whether that was in time."""
        self._stop.set()

    def wait(self, deadline: Deadline) -> _Result:
        """The result, or the error that was raised. DeadlineExceeded says how far the work is, and leaves it running."""
        self._thread.join(deadline.remaining_s())
        if self._thread.is_alive():
            raise deadline.exceeded(f"{self._what}, {self.done_bytes} of {self.total_bytes} bytes done")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def close(self) -> None:
        """Cancel it, and wait until its thread has ended: at the end of the current block. May be called twice."""
        self.cancel()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Work[_Result]) -> None:
        try:
            self._result.append(work(self._stop.is_set, self._count))
        except BaseException as error:  # `wait` raises it
            self._error = error

    def _count(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
