"""The live verifier: digests a rank's own live weights while the rank does other work.

Owns a thread, which starts with the first order. The thread holds no lock while it reads, so that no swap waits for it; if weights were
swapped meanwhile, the answer has no digests. The staging thread sends the answers to the leader.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import Kernels
from liveweight.errors import LiveWeightError, Unavailable, WrongState
from liveweight.observe.bus import Bus
from liveweight.observe.events import AuditBegan
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.wire.messages import DigestLive, LiveDigests
from liveweight.wire.messages.values import fault_of
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.shadow_lock import ShadowLock
from liveweight.worker.staging import Pace, StagingStopped
from liveweight.worker.targets.target import ReadBack, Target

DOUBT_S = 5.0
"""How long the outcome of a swap may take before the answer to an order is that the rank is in doubt."""
POLL_S = 0.1


class LiveVerifier:
    """Digests one rank's live weights. All methods are for the staging thread; `wake` is called from the verifier's own thread."""

    def __init__(
        self,
        *,
        rank: int,
        target: Target,
        kernels: Kernels,
        shadow_lock: ShadowLock,
        pace_bytes_per_s: float | None,
        replica: str,
        bus: Bus,
        wake: Callable[[], None],
    ) -> None:
        self._rank, self._target, self._kernels = rank, target, kernels
        self._replica, self._bus = replica, bus
        self._shadow_lock, self._pace_bytes_per_s, self._wake = shadow_lock, pace_bytes_per_s, wake
        self._orders: queue.SimpleQueue[tuple[DigestLive, Deadline] | None] = queue.SimpleQueue()
        self._answers: deque[LiveDigests] = deque()
        self._digest: ShadowDigest | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, order: DigestLive) -> None:
        """Queue an order. Answers come in the order of the orders."""
        self._orders.put((order, Deadline.after(order.timeout_s)))
        if self._thread is None:
            name = f"liveweight-live-verifier-{self._rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def answers(self) -> list[LiveDigests]:
        """The answers since the last call."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def close(self) -> None:
        """End the thread, also in the middle of a reading."""
        self._closing = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with CopyThreads(1) as copy_threads:
            while (taken := self._orders.get()) is not None and not self._closing:
                self._answers.append(self._answer(*taken, copy_threads))
                self._wake()

    def _answer(self, order: DigestLive, deadline: Deadline, copy_threads: CopyThreads) -> LiveDigests:
        began_s, fault, lanes, read_back = time.monotonic(), None, None, ReadBack()
        try:
            lanes, read_back = self._read(order, deadline, copy_threads)
        except Exception as error:  # whatever it is, the leader waits for an answer
            ours = (
                error
                if isinstance(error, LiveWeightError)
                else Unavailable(f"{type(error).__name__}: {error}")
            )
            fault = fault_of(ours, step="verify", rank=self._rank, waited_s=deadline.waited_s())
        return LiveDigests(
            audit=order.audit,
            rank=self._rank,
            lanes=lanes,
            seconds=time.monotonic() - began_s,
            fault=fault,
            differing=read_back.differing,
            unread=read_back.unread,
        )

    def _read(
        self, order: DigestLive, deadline: Deadline, copy_threads: CopyThreads
    ) -> tuple[bytes | None, ReadBack]:
        """The digests, and the comparison with what serves; None if weights were swapped meanwhile.

        The count is read before it is certain that no swap is under way: one that begins later raises it.
        """
        swaps = self._shadow_lock.swaps
        self._wait_until_certain(deadline)
        self._bus.emit(AuditBegan(replica=self._replica, rank=self._rank))

        def changed() -> bool:
            return self._shadow_lock.swaps != swaps

        try:
            lanes = self._live_digest().of(
                self._target.live(order.names),
                copy_threads=copy_threads,
                stop=lambda: self._closing or changed(),
                deadline=deadline,
                names=None if order.names is None else frozenset(order.names),
                pace=None if self._pace_bytes_per_s is None else Pace(self._pace_bytes_per_s),
            )
            read_back = self._target.read_back() or ReadBack()
        except Exception:
            if changed():  # in the middle of a swap tensors are not where they were
                return None, ReadBack()
            raise
        if isinstance(lanes, StagingStopped) or changed():
            return None, ReadBack()
        return lanes_to_bytes(lanes), read_back

    def _wait_until_certain(self, deadline: Deadline) -> None:
        """Wait for a swap that is under way to end."""
        doubt = deadline.within(DOUBT_S)
        while not self._shadow_lock.certain(min(POLL_S, doubt.remaining_s())):
            if self._closing or doubt.over:
                raise WrongState("in doubt about the last commit", "verify")

    def _live_digest(self) -> ShadowDigest:
        """Made at first use: most ranks never get an order."""
        if self._digest is None:
            self._digest = ShadowDigest(self._target.layout, self._kernels)
        return self._digest
