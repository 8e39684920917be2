"""A rank of the peers: one process that holds its share of the weights and receives them by every method in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from liveweight.devices.copy_threads import CopyThreads
from liveweight.devices.kernels import choose_kernels
from liveweight.lab.bench.peers import files, gloo, queues, zmq_buckets
from liveweight.lab.bench.peers.contender import WAIT_S, PeerMethod, PeerReceiver, PeerShare, Rendezvous, Talk
from liveweight.plan.digest_sums import lanes_to_bytes
from liveweight.spec.deadline import Deadline
from liveweight.worker.shadow_digest import ShadowDigest
from liveweight.worker.targets.torch_target import TensorTarget

METHODS: tuple[PeerMethod, ...] = (*gloo.METHODS, *files.METHODS, *zmq_buckets.METHODS, *queues.METHODS)


def main(rank: int, rendezvous: Rendezvous, talk: Talk) -> None:
    """Execute the benchmark's commands until `stop`."""
    import torch

    torch.set_num_threads(1)
    share = PeerShare(rendezvous.specs, rank, rendezvous.ranks)
    receivers: dict[str, PeerReceiver] = {}
    talk.send("ready")
    while (message := talk.recv()) != ("stop", ""):
        what, name = message
        if what == "make":
            receivers[name] = method_of(name).receiver(rendezvous, share)
            talk.send("made")
        elif what == "receive":
            talk.send("set")
            receivers[name].receive(talk)
            talk.send(time.monotonic())
        elif what == "clear":
            share.clear()
            talk.send("cleared")
        elif what == "lanes":
            talk.send(lanes_of(share))
    for receiver in receivers.values():
        receiver.close()


def method_of(name: str) -> PeerMethod:
    """The method of that name."""
    return next(method for method in METHODS if method.name == name)


def lanes_of(share: PeerShare) -> bytes:
    """A digest of a rank's weights."""
    target = TensorTarget(share.held)
    with CopyThreads(1) as copy_threads:
        reading = ShadowDigest(target.layout, choose_kernels())
        return lanes_to_bytes(
            reading.all_of(target.live(), copy_threads=copy_threads, deadline=Deadline.after(WAIT_S))
        )


class PeerRanks:
    """The benchmark's handle of all ranks. Ends with `close`."""

    def __init__(self, rendezvous: Rendezvous, queues_for: Any) -> None:
        """`queues_for` is the multiprocessing context that the rendezvous's queues were made with."""
        self._processes, self.talks = [], []
        for rank in range(rendezvous.ranks):
            ours, theirs = queues_for.Pipe()
            process = queues_for.Process(target=main, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self.talks.append(ours)
        self.receive()

    def send(self, what: str, name: str = "") -> None:
        """Send to all ranks."""
        for talk in self.talks:
            talk.send((what, name))

    def receive(self) -> Sequence[Any]:
        """Receive the next message of each rank."""
        for talk, process in zip(self.talks, self._processes, strict=True):
            if not talk.poll(WAIT_S):
                raise Deadline.after(0.0).exceeded(f"rank process {process.pid} of the benchmark")
        return [talk.recv() for talk in self.talks]

    def close(self) -> None:
        """End the ranks; they have exited on return."""
        for talk, process in zip(self.talks, self._processes, strict=True):
            if process.is_alive():
                talk.send(("stop", ""))
            process.join(30.0)
            if process.is_alive():
                process.kill()
                process.join()
            talk.close()
