"""`liveweight doctor`: what this machine can do, and the line that fixes what it cannot.

Owns the checks. Each is one function, which changes nothing that lasts, and never raises because of what it finds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from liveweight.cli.exit_codes import FAILED
from liveweight.errors import LiveWeightError

INFINIBAND = Path("/sys/class/infiniband")
PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
SHARED_MEMORY = Path("/dev/shm")
DESCRIPTORS_WANTED = 4096
LOCKED_WANTED = "unlimited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: `ok`, `limited` (something is slower or not possible) or `broken` (nothing works without it)."""

    name: str
    state: Literal["ok", "limited", "broken"]
    found: str
    fix: str | None = None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> None:
    """Say what this machine can do for weight transfer, with the line that fixes what it cannot. Exit code 1 if something is broken.

    For example: liveweight doctor --json
    """
    found = examine()
    if as_json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in found]}, indent=2))
    else:
        for finding in found:
            print(f"{finding.state:8} {finding.name:16} {finding.found}")
            if finding.fix is not None:
                print(f"{'':25} fix: {finding.fix}")
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(FAILED)


def examine() -> list[Finding]:
    """Run all checks, in the order in which they are printed."""
    questions: Sequence[Callable[[], Finding]] = (
        shared_memory,
        kernels,
        descriptors,
        gloo,
        gpus,
        cuda_ipc,
        nixl,
        nixl_backend,
        rdma_devices,
        locked_memory,
        reads_between_processes,
    )
    return [question() for question in questions]


def shared_memory() -> Finding:
    """Sealed memory, which every offer of host memory needs; and the room for torch's own shared memory."""
    from liveweight.transports.ipc.arena import SharedArena

    name = "shared memory"
    try:
        SharedArena(4096).close()
    except LiveWeightError as error:
        return Finding(name=name, state="broken", found=str(error), fix="run on Linux 5.3 or newer")
    if not SHARED_MEMORY.is_dir():
        return Finding(
            name=name,
            state="limited",
            found="sealed memory works; there is no /dev/shm, which torch's workers want",
            fix="mount -t tmpfs tmpfs /dev/shm",
        )
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    return Finding(name=name, state="ok", found=f"sealed memory works; /dev/shm has {free >> 20} MiB free")


def kernels() -> Finding:
    """Which implementation copies and digests."""
    from liveweight.devices.kernels import choose

    chosen = choose()
    if chosen.reason is None:
        return Finding(name="kernels", state="ok", found=chosen.name)
    return Finding(
        name="kernels",
        state="limited",
        found=f"{chosen.name}: {chosen.reason}",
        fix="install a C compiler, then: pip install --force-reinstall --no-binary liveweight liveweight",
    )


def descriptors() -> Finding:
    """How many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files at most, may be raised to {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS_WANTED:
        return Finding(name="descriptors", state="ok", found=found)
    return Finding(name="descriptors", state="limited", found=found, fix="ulimit -n 65536")


def gloo() -> Finding:
    """Gloo, by which ranks without a scheduler agree on the step at which they swap."""
    if find_spec("torch") is None:
        return Finding(
            name="gloo",
            state="limited",
            found="torch is not installed",
            fix="pip install 'liveweight[torch]'",
        )
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        return Finding(name="gloo", state="ok", found="torch has it")
    return Finding(
        name="gloo",
        state="limited",
        found="torch was built without it: a replica of several ranks needs the embedded engine",
        fix="pip install --force-reinstall torch",
    )


def gpus() -> Finding:
    """CUDA devices that torch sees."""
    names = _gpus()
    if names:
        return Finding(name="GPUs", state="ok", found=", ".join(names))
    return Finding(
        name="GPUs",
        state="limited",
        found="none that torch can use: weights are kept in host memory",
        fix="on a host with a GPU: install its driver and a CUDA build of torch",
    )


def cuda_ipc() -> Finding:
    """Whether processes can share device memory."""
    if not _gpus():
        return Finding(name="CUDA IPC", state="limited", found="needs a GPU", fix="see GPUs")
    if Path("/.dockerenv").exists() and not SHARED_MEMORY.is_dir():
        return Finding(
            name="CUDA IPC",
            state="limited",
            found="this container shares no IPC namespace",
            fix="docker run --ipc=host",
        )
    return Finding(
        name="CUDA IPC", state="ok", found="trainer and ranks on one device can use transfer mode ipc"
    )


def nixl() -> Finding:
    """The library of the transfer modes that reach other hosts."""
    try:
        found = version("nixl")
    except PackageNotFoundError:
        return Finding(
            name="NIXL",
            state="limited",
            found="not installed: no gdr, no rdma",
            fix="pip install 'liveweight[nixl]'",
        )
    return Finding(name="NIXL", state="ok", found=f"version {found}")


def nixl_backend() -> Finding:
    """Whether NIXL starts, and what it can read."""
    from liveweight.transports.nixl.library import probe

    try:
        plugins, memory = probe()
    except LiveWeightError as error:
        return Finding(
            name="NIXL backends", state="limited", found=str(error), fix="pip install 'liveweight[nixl]'"
        )
    return Finding(
        name="NIXL backends",
        state="ok",
        found=f"UCX starts and reads {', '.join(memory)}; plugins: {', '.join(plugins)}",
    )


def rdma_devices() -> Finding:
    """Network cards that read remote memory by themselves."""
    found = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if found:
        return Finding(name="RDMA devices", state="ok", found=", ".join(found))
    return Finding(
        name="RDMA devices",
        state="limited",
        found="none: between hosts, gdr and rdma go over TCP",
        fix="with a card that can: modprobe ib_uverbs, and in a container: docker run --device=/dev/infiniband",
    )


def locked_memory() -> Finding:
    """How much memory a process may register with a network card."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{_limit(soft, 'bytes')} may be locked"
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding(name="locked memory", state="ok", found=found)
    return Finding(
        name="locked memory",
        state="limited",
        found=f"{found}: an RDMA device registers no more than that",
        fix=f"ulimit -l {LOCKED_WANTED}",
    )


def reads_between_processes() -> Finding:
    """Whether a process of this user may read another's memory, which is UCX's fastest way on one host."""
    try:
        scope = int(PTRACE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return Finding(name="process reads", state="ok", found="not restricted")
    if scope == 0 or (scope < 3 and os.geteuid() == 0):
        return Finding(name="process reads", state="ok", found=f"allowed (ptrace_scope {scope})")
    return Finding(
        name="process reads",
        state="limited",
        found=f"restricted (ptrace_scope {scope}): gdr and rdma on one host go over TCP, which is slower",
        fix="sysctl -w kernel.yama.ptrace_scope=0",
    )


def _gpus() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _limit(value: int, unit: str = "") -> str:
    return "any number" if value == resource.RLIM_INFINITY else f"{value} {unit}".strip()
