"""Two hosts for a test: network namespaces joined by one cable, which the test may cut, slow down and mend.

Needs root and iproute2. Processes are put into a host by its name. UCX is set to use TCP there, for it would notice that both are
one machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAINER, ENGINE = "10.231.7.1", "10.231.7.2"
"""Their addresses: each in a namespace of its own, seen by nobody else."""
ENVIRONMENT = {"UCX_TLS": "tcp"}
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x20000
_RECURSIVE, _SLAVE, _DETACH = 0x4000, 0x80000, 2
_NAMESPACES = Path("/run/netns")


class NoNamespaces(Exception):
    """This machine does not let us make hosts; the reason."""


class TwoHosts:
    """The names of the two hosts, and their cable."""

    def __init__(self) -> None:
        self.trainer, self.engine = (f"lw-{side}-{os.getpid()}" for side in ("trainer", "engine"))

    def make(self) -> None:
        """Make both and join them."""
        for host in (self.trainer, self.engine):
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
        _ip(*f"-n {self.trainer} link add cable type veth peer name cable netns {self.engine}".split())
        for host, address in ((self.trainer, TRAINER), (self.engine, ENGINE)):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "cable")
        self.mend()

    def cut(self) -> None:
        """Nothing passes any more, without an error: the engine's end goes dead."""
        _ip("-n", self.engine, "link", "set", "cable", "down")

    def mend(self) -> None:
        """Everything passes."""
        for host in (self.trainer, self.engine):
            _ip("-n", host, "link", "set", "cable", "up")

    def disturb(self, *how: str) -> None:
        """Delay, lose or narrow what the trainer sends: arguments of tc's netem. NoNamespaces where the kernel has none."""
        _run("tc", "-n", self.trainer, "qdisc", "replace", "dev", "cable", "root", "netem", *how)

    def remove(self) -> None:
        """Both, with their cable."""
        for host in (self.trainer, self.engine):
            if (_NAMESPACES / host).exists():
                _ip("netns", "del", host)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts that are gone after the test."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNamespaces("network namespaces need root and iproute2")
    hosts = TwoHosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def enter(host: str) -> None:
    """Put this process, before it has threads, on that host. UCX looks for its cards in /sys, which is that host's then, too."""
    with (_NAMESPACES / host).open() as namespace:
        _call("setns", namespace.fileno(), _NEW_NETWORK)
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
    _call("umount2", b"/sys", _DETACH)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
    os.environ.update(ENVIRONMENT)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
