"""The public interface, `import liveweight as lw`: composes publisher and receiver, with defaults for one host.

Without arguments, both sides of one user on one host use the same secret file; across users or hosts, give both the same file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from liveweight.devices.copy_ranges import threads_for
from liveweight.devices.cuda import CudaDevice
from liveweight.devices.device import CPU, CpuDevice, Device, open_device
from liveweight.devices.kernels import choose_kernels
from liveweight.integrations.connect import Engine, connect
from liveweight.integrations.offer_stream import Streaming
from liveweight.observe.bus import Bus
from liveweight.observe.events import OfferKind
from liveweight.observe.log import logging_bus
from liveweight.rounds.one_thread import ExclusiveCalls
from liveweight.spec.deadline import Deadline
from liveweight.spec.layout import Piece
from liveweight.spec.manifest import Version
from liveweight.trainer.handshake import (
    HandshakeResult,
    check_arguments,
    describe_to,
    handshake,
    handshake_without_engines,
    offered_dtype,
    own_host,
)
from liveweight.trainer.offers.live import SharedModule, source_device, source_of
from liveweight.trainer.offers.live import share_module as _share_module
from liveweight.trainer.offers.pull_server import PullServer
from liveweight.trainer.offers.single_source import SingleSourceOffers
from liveweight.trainer.offers.transfer_fallback import TransferFallback, in_order
from liveweight.trainer.settings import Behind, PublisherSettings
from liveweight.trainer.sources.kept_tensors import Keep, plan_keep
from liveweight.trainer.sources.module_walker import ModuleWalker
from liveweight.trainer.sources.one_shot_source import OneShotSource
from liveweight.trainer.spmd.join_ranks import SpmdSettings, join_ranks
from liveweight.trainer.spmd.spmd_publisher import SpmdPublisher
from liveweight.transports.ipc.source import allocate
from liveweight.transports.packing_source import RingSettings
from liveweight.transports.registry import TRANSPORTS, check_device
from liveweight.wire.credentials import Secret, load_or_create_secret, socket_directory
from liveweight.wire.default_paths import default_directory, default_secret_file
from liveweight.wire.messages.values import KvPolicy
from liveweight.worker import receiver as receiving
from liveweight.worker.commit import Hook
from liveweight.worker.staging import BATCH_BYTES
from liveweight.worker.staging_thread import StagingSettings
from liveweight.worker.targets.target import Target
from liveweight.worker.targets.torch_layout import device_of
from liveweight.worker.targets.torch_target import ExchangeMode, ShadowPlace, as_target

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DeviceName: TypeAlias = "str | torch.device | CpuDevice | CudaDevice"
"""A device, named with its index: `cpu`, `cuda:0`."""


class Publisher(SpmdPublisher):
    """Sends a trainer's weights to running engines.

        with lw.Publisher(model, engines=["ipc:///run/me/engine.sock"]) as publisher:
            for step, batch in enumerate(data):
                train(batch)
                publisher.publish(step)   # RoundFailed: the engines still serve step - 1

    `model` is a torch module, what `share_module` returned, a state dict, an HF checkpoint directory or a Source. `engines` are the
    leaders' addresses, URLs of engines that give their address for the control key, or `vllm(...)`. Manifests are compared
    here, before training starts. Methods are for one thread at a time; `close` is for any. `offer="live"` lets ranks read the
    parameters where they lie; where that is not possible the publisher says why and freezes. `offer="ring"` packs them, for each rank
    what it owns, into a few segments of shared memory (`ring`), and needs no copy of the weights; both wait until all ranks have
    staged. `device` is where offers lie, and must be where the ranks' weights are: by default a shared module's, else the host.
    `threads` are for host memory.

    `transfer_mode="gdr"` or `"rdma"` (default: `"ipc"`) reaches other hosts; `host` is this host's address for their ranks, by default
    the interface towards the first engine. Of `modes=["gdr", "ipc_snapshot"]` the next one is used after a round in which one failed.

    With `group`, every rank of a trainer makes one, of its FSDP2 module or its DTensors, and calls the same methods in the same order:
    each freezes its own shards, engine ranks read from the ranks that have what they need, and nothing is gathered. The group is used only
    here. Only rank 0 connects to the engines; its outcome is every rank's. `offer` returns once the local shards are frozen.

    With a `quorum` a round goes on without replicas that fail, or take longer than `replica_timeout_s` to stage and verify: the report
    says which are `behind`, and the next round brings them along, or `catch_up()` before it. `behind="stand_back"` lets them take no
    requests until then. Without one, all commit or none. `fleet()` says at any time how each of them is.

    Without a model, every version comes as an iterator: `publish(label, tensors=iterator)` of (name, tensor), in any order. It is copied
    straight into the arena that engines read, which is laid out by what they expect, and is always run to its end, also when the round
    fails: it may be a collective of the trainer's ranks. With `group`, every rank gives its own, and rank 0 freezes. With `address` alone
    the first version says which tensors the later ones have.

    With `address`, engines that were started with `--weights-from` may pull the version that `offer` made last from there; `engines` may
    then be left out. Without engines, no dtypes are expected: the weights are offered in their own, or in `dtype`.

    `keep` names tensors that the engines keep as they are: `"frozen"` for parameters without a gradient, patterns such as
    `["visual.*"]`, or a mapping of names to tensors. Engines compare their own with the trainer's before the first round (KeptDiffers
    names those that differ); of tensors that the trainer does not have, with those of the engine's start.
    """

    def __init__(
        self,
        model: object = None,
        *,
        engines: Sequence[Engine] = (),
        address: str | None = None,
        dtype: str | torch.dtype | None = None,
        control_key: str | None = None,
        secret: Secret | Path | None = None,
        directory: Path | None = None,
        transfer_mode: str | None = None,
        modes: Sequence[str] = (),
        host: str | None = None,
        device: DeviceName | None = None,
        offer: OfferKind = "frozen",
        ring: RingSettings | None = None,
        verify: bool = True,
        timeout_s: float = 60.0,
        lease_s: float = 10.0,
        release_s: float = 5.0,
        quorum: int | None = None,
        replica_timeout_s: float | None = None,
        behind: Behind = "serve",
        kv_policy: KvPolicy | None = None,
        keep: Keep | None = None,
        threads: int | None = None,
        run: str | None = None,
        bus: Bus | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self._calls = ExclusiveCalls()
        model = OneShotSource() if model is None else model
        self._source = model
        bus = logging_bus() if bus is None else bus
        held, secret_file = _secret(secret), secret if isinstance(secret, Path) else None
        reach = partial(connect, secret=held, secret_file=secret_file, key=control_key)
        sockets = socket_directory(directory or default_directory())
        chosen = in_order(transfer_mode, modes, offer)
        check_arguments(engines, address, dtype, offer, ranked=group is not None, modes=len(chosen))
        settings = PublisherSettings(
            offer=offer,
            verify=verify,
            timeout_s=timeout_s,
            lease_s=lease_s,
            release_s=release_s,
            quorum=quorum,
            replica_timeout_s=replica_timeout_s,
            behind=behind,
            kv_policy=kv_policy,
        )
        name, run = f"{os.uname().nodename}/{os.getpid()}/{secrets.token_hex(2)}", run or secrets.token_hex(8)
        if group is not None:
            home = CPU if device is None else _opened(device) or CPU
            spmd_settings = SpmdSettings(
                secret=held,
                directory=sockets,
                mode=chosen[0],
                host=host,
                device=home,
                kernels=choose_kernels(bus, home.choose()),
                threads=threads_for(threads, home),
                bus=bus,
                settings=settings,
                name=name,
                run=run,
                keep=keep,
                engines=len(engines),
                connect=lambda _: reach(engines),
            )
            self._ranked = join_ranks(model, group, spmd_settings)
            self.name, self.run, self.settings, self.address = name, self._ranked.run, settings, None
            return
        source, shared = source_of(model)
        there, deadline = source_device(_opened(device), shared), Deadline.after(timeout_s)
        check_device(chosen[0], offer, there)
        with ExitStack() as stack:
            replicas = reach(engines)
            for replica in replicas:
                stack.callback(replica.close)
            if engines or address is None:
                agreed: HandshakeResult | None = handshake(replicas, deadline, quorum)
            elif isinstance(source, OneShotSource):
                agreed = None  # the first offer learns what is offered
            else:
                agreed = handshake_without_engines(source, None if dtype is None else str(dtype))
            kept = plan_keep(keep, source, None if agreed is None else agreed.expected)
            hosts = [own_host(host, each, replicas, address) for each in chosen]
            fallback = TransferFallback.open(chosen, hosts, sockets, held, there, bus)
            stack.callback(fallback.close)
            offers = SingleSourceOffers(
                source=source,
                expected=None if agreed is None else agreed.expected,
                fallback=fallback,
                kernels=choose_kernels(bus, there.choose()),
                shared=shared,
                threads=threads_for(threads, there),
                bus=bus,
                ring=ring,
                keep=kept,
                dtype=offered_dtype(None if dtype is None else str(dtype)),
            )
            if agreed is not None:
                describe_to(replicas, offers, agreed, deadline)
            pull_server = None
            if address is not None:
                pull_server = PullServer(address, held, bus=bus)
                stack.callback(pull_server.close)
            super().__init__(
                name=name,
                run=run,
                replicas=replicas,
                offers=offers,
                pull_server=pull_server,
                settings=settings,
                boots=() if agreed is None else agreed.boots,
                served=() if agreed is None else agreed.served,
            )
            stack.pop_all()
        self._fallback, self._source = fallback, source
        self.address = None if pull_server is None else pull_server.address
        """Where engines pull the offered version; None if they may not."""


class Receiver(Streaming, receiving.RankReceiver):
    """Makes a program that holds tensors a rank of a replica.

        with lw.Receiver(model) as receiver:
            print(receiver.address)          # give it to the publisher
            while serving:
                step(model)
                receiver.at_boundary()       # a new version becomes visible here, whole, or not at all

    `target` is a torch module, a mapping of names to tensors (or to a tensor and the pieces of full tensors that it holds), or a
    Target. A replica of several ranks gives every rank the same `address` and a gloo `group`. `device` is where the weights are:
    their tensors', which must agree with it if it is given; of a Target of one's own, the host unless it is given. `shadow="host"` keeps
    the second copy of the weights in the host's memory, reads sources there, and swaps by copying: a longer stall for a device that
    has no room for two. `shadow="none"` keeps none: while all ranks stand at a boundary, a commit reads the source over the live weights,
    `chunk_bytes` at a time; if that fails half-way, `at_boundary` raises Torn until a later round has brought all.
    `weights_from` is the address of a source, for `stream`.
    """

    def __init__(
        self,
        target: torch.nn.Module | Mapping[str, torch.Tensor | tuple[torch.Tensor, Sequence[Piece]]] | Target,
        *,
        pieces: Mapping[str, Sequence[Piece]] | None = None,
        device: DeviceName | None = None,
        address: str | None = None,
        secret: Secret | Path | None = None,
        rank: int = 0,
        world: int = 1,
        group: ProcessGroup | None = None,
        replica: str | None = None,
        serving: Version | None = None,
        exchange: ExchangeMode = "swap",
        shadow: ShadowPlace = "device",
        hooks: Sequence[Hook] = (),
        threads: int = 1,
        pace_bytes_per_s: float | None = None,
        chunk_bytes: int = BATCH_BYTES,
        bus: Bus | None = None,
        weights_from: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        held, bus = _secret(secret), logging_bus() if bus is None else bus
        self._streams_from = None if weights_from is None else (weights_from, held)
        placed = as_target(target, pieces, exchange=exchange, shadow=shadow, device=_opened(device))
        kernels, home = choose_kernels(bus, placed.home.choose()), placed.home
        if address is None:
            address = f"ipc://{default_directory()}/receiver-{os.getpid()}-{secrets.token_hex(4)}.sock"
        super().__init__(
            placed.target,
            address=address,
            secret=held,
            kernels=kernels,
            readers={name: found.reader(held, kernels, home) for name, found in TRANSPORTS.items()},
            live_kernels=kernels if home is placed.device else placed.device.choose().kernels,
            rank=rank,
            world=world,
            group=group,
            replica=replica,
            serving=serving,
            hooks=hooks,
            settings=StagingSettings(threads=threads, pace_bytes_per_s=pace_bytes_per_s),
            bus=bus,
            in_place=placed.in_place(chunk_bytes),
            timeout_s=timeout_s,
        )


def share_module(module: torch.nn.Module, *, device: DeviceName | None = None) -> SharedModule:
    """Move a module's parameters and persistent buffers into memory that others can read, so that live offers are possible.

    The parameters stay the same objects and an optimiser goes on with them. Give the result to `Publisher`; `close()` moves them back.
    They stay on their device, which must be one, and `device` if that is given.
    """
    there = _opened(device)
    if there is None:
        walker = ModuleWalker.of(module)
        there = open_device(device_of(dict(zip(walker.names, walker.tensors(), strict=True))))
    return _share_module(module, partial(allocate, device=there), str(there.torch_device))


def _secret(given: Secret | Path | None) -> Secret:
    if isinstance(given, Secret):
        return given
    return load_or_create_secret(default_secret_file() if given is None else given)


def _opened(device: DeviceName | None) -> Device | None:
    if device is None or isinstance(device, CpuDevice | CudaDevice):
        return device
    return open_device(str(device))
