"""FSDP2 trains a small model on several processes and publishes every step to a program that runs it; nothing is ever gathered.

    python examples/fsdp2.py --ranks 4 --steps 3

Every training process freezes the shards that it holds. The running program (here this process; any number of engines elsewhere) reads each
region from a process that holds it, verifies the whole, and exchanges it between two of its own steps. Masters are float32, the program
runs bfloat16: the cast is part of the freeze.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import liveweight as lw


def main() -> None:
    """Run the program here, and the training beside it, until the last step is published."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=3)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    model = network().to(torch.bfloat16)
    question = torch.ones(1, 64, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as place, lw.Receiver(model) as receiver:
        work = (chosen.ranks, chosen.steps, receiver.address, f"{place}/store")
        training = processes.spawn(train, work, nprocs=chosen.ranks, join=False)
        before = None
        while not training.join(timeout=0.001):
            serving = receiver.at_boundary()  # a new version becomes visible here, whole, or not at all
            with torch.no_grad():
                answer = model(question).float().norm().item()
            if serving is not None and serving != before:
                print(f"running step {serving}: answer {answer:.4f}", flush=True)
            before = serving


def train(rank: int, ranks: int, steps: int, engine: str, store: str) -> None:
    """One training process; every rank runs every line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lw.Publisher(
        model, engines=[engine], group=dist.group.WORLD
    ) as publisher:  # the group is used only here
        for step in range(1, steps + 1):
            optimiser.zero_grad()
            loss = functional.mse_loss(model(torch.randn(8, 64)), torch.ones(8, 64))
            loss.backward()
            optimiser.step()
            with torch.no_grad():
                model(torch.ones(1, 64))  # leaves some modules gathered; what is published are the shards
            if step > 1:
                publisher.wait()  # the round before; rank 0's outcome, on every rank
            publisher.offer(step)  # returns once the local shards are frozen; parameters may change now
        report = publisher.wait()
        if rank == 0:
            found = publisher.verify()
            print(
                f"published step {report.version}, {report.size_bytes} bytes, exact: {found.match}",
                flush=True,
            )
    dist.destroy_process_group()


def network() -> torch.nn.Sequential:
    """The same model on both sides; 250 rows do not divide by 4, so shards are uneven."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 250), torch.nn.ReLU(), torch.nn.Linear(250, 64))


if __name__ == "__main__":
    main()
