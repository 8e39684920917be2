"""A rank of the peers: one process that holds its share of the weights and receives them by every way in turn."""

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

WAYS: tuple[PeerMethod, ...] = (*gloo.WAYS, *files.WAYS, *zmq_buckets.WAYS, *queues.WAYS)


def main(rank: int, meeting: Rendezvous, talk: Talk) -> None:
    """Do what the benchmark says, until it says stop."""
    import torch

    torch.set_num_threads(1)
    share = PeerShare(meeting.specs, rank, meeting.ranks)
    receivers: dict[str, PeerReceiver] = {}
    talk.send("ready")
    while (word := talk.recv()) != ("stop", ""):
        what, name = word
        if what == "make":
            receivers[name] = way_of(name).receiver(meeting, share)
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


def way_of(name: str) -> PeerMethod:
    """The way of that name."""
    return next(way for way in WAYS if way.name == name)


def lanes_of(share: PeerShare) -> bytes:
    """What a rank's weights are, bit for bit."""
    target = TensorTarget(share.held)
    with CopyThreads(1) as copy_threads:
        reading = ShadowDigest(target.layout, choose_kernels())
        return lanes_to_bytes(
            reading.all_of(target.live(), copy_threads=copy_threads, deadline=Deadline.after(WAIT_S))
        )


class PeerRanks:
    """The benchmark's side of them. Ends with `close`."""

    def __init__(self, meeting: Rendezvous, queues_for: Any) -> None:
        """`queues_for` is the multiprocessing context that the meeting's queues were made with."""
        self._processes, self.talks = [], []
        for rank in range(meeting.ranks):
            ours, theirs = queues_for.Pipe()
            process = queues_for.Process(target=main, args=(rank, meeting, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self.talks.append(ours)
        self.receive()

    def send(self, what: str, name: str = "") -> None:
        """To all of them."""
        for talk in self.talks:
            talk.send((what, name))

    def receive(self) -> Sequence[Any]:
        """The next word of each."""
        for talk, process in zip(self.talks, self._processes, strict=True):
            if not talk.poll(WAIT_S):
                raise Deadline.after(0.0).exceeded(f"rank process {process.pid} of the benchmark")
        return [talk.recv() for talk in self.talks]

    def close(self) -> None:
        """They have ended on return."""
        for talk, process in zip(self.talks, self._processes, strict=True):
            if process.is_alive():
                talk.send(("stop", ""))
            process.join(30.0)
            if process.is_alive():
                process.kill()
                process.join()
            talk.close()
