"""The freeze from float32, beside an equally threaded plain cast-copy into the same memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from liveweight.devices.kernels import choose
from liveweight.trainer.offers.freeze import Freezer
from liveweight.trainer.offers.live import SharedModule
from liveweight.trainer.sources.in_memory import StateDictSource
from liveweight.transports.ipc.arena import SharedArena


def bench_freeze(shared: SharedModule, rounds: int) -> dict[str, float]:
    """The freeze from float32 alone, with and without digests, beside an equally threaded plain cast-copy."""
    import torch

    threads = os.cpu_count() or 1
    wide = {name: tensor.detach().float() for name, tensor in shared.module.state_dict().items()}
    source = StateDictSource(wide)
    freezer = Freezer(source.manifest(), shared.manifest, choose().kernels)
    arena = SharedArena(freezer.layout.memories_bytes[0])
    memory = arena.memory
    flat = torch.from_numpy(memory.bytes())
    views = [
        flat[p.offset_bytes : p.offset_bytes + spec.size_bytes].view(torch.bfloat16).view(spec.shape)
        for p, spec in zip(freezer.layout.placements, shared.manifest, strict=True)
    ]
    taken: dict[str, list[float]] = {"cast_copy_s": [], "freeze_s": [], "freeze_plain_s": []}
    with _torch_threads(threads):
        for _ in range(rounds + 1):
            began_s = time.monotonic()
            for view, tensor in zip(views, wide.values(), strict=True):
                view.copy_(tensor)
            taken["cast_copy_s"].append(time.monotonic() - began_s)
            for name, digest in (("freeze_s", True), ("freeze_plain_s", False)):
                taken[name].append(freezer.freeze(source, memory, threads=threads, digest=digest).took_s)
    freezer.forget()
    del views, flat, memory
    arena.close()
    best = {name: min(times[1:]) for name, times in taken.items()}
    return best | {"freeze_ratio": best["freeze_s"] / best["cast_copy_s"]}


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)
