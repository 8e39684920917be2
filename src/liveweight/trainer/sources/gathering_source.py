"""Gathering sources: an iterator that is itself a collective, as those are that put full tensors together from a trainer's ranks.

All ranks must run it to its end, also when one of them has nothing more to do with the tensors, because something failed: else the others
wait in it for ever. What an iterator raises itself is its own matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from liveweight.trainer.sources.in_memory import IteratorSource
from liveweight.trainer.sources.tensors import AnyTensor


class GatheringSource(IteratorSource):
    """An IteratorSource whose passes are collectives: whatever happens, every offer makes one pass, to its end.

        source = lw.GatheringSource(metadata, lambda: bridge.export_weights(model))    # on every rank
        publisher = lw.Publisher(source, engines=URLS, group=dist.group.WORLD)

    `metadata` lists (name, dtype, full shape) in the order of the pass. With a group, rank 0 freezes what comes, and the others only run
    the iterator; without one, every other rank of the collective runs it by itself.
    """

    _passes = 0
    _current: Iterator[tuple[str, AnyTensor]] = iter(())

    def tensors(self) -> Iterator[tuple[str, AnyTensor]]:
        """A new pass of the factory."""
        self._passes += 1
        self._current = super().tensors()
        return self._current

    def exhaust(self) -> None:
        """Run a whole pass for its own sake: this rank has no use for what comes."""
        with run_to_end(self.tensors):
            pass

    @contextmanager
    def owed(self) -> Iterator[None]:
        """Make sure that one whole pass is made for the other ranks: on leaving, also with an error, begin or end the pass if the block did
        not."""
        before = self._passes
        with run_to_end(lambda: self._current if self._passes > before else self.tensors()):
            yield


def ensure_pass(source: object) -> AbstractContextManager[None]:
    """`GatheringSource.owed`; for any other source, nothing."""
    return source.owed() if isinstance(source, GatheringSource) else nullcontext()


@contextmanager
def run_to_end(tensors: Callable[[], Iterable[object]]) -> Iterator[None]:
    """On leaving, also with an error, run the pass to its end: `tensors` is called then, and says which."""
    try:
        yield
    except BaseException:
        # An error of ours says what was wrong; one that the rest of the pass raises would hide it.
        with suppress(Exception):
            _drain(tensors())
        raise
    _drain(tensors())


def _drain(tensors: Iterable[object]) -> None:
    for _ in tensors:
        pass
