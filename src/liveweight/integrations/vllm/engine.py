"""`lw.vllm(...)`: how a trainer names a vLLM among its engines."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import xxhash

from liveweight.errors import Refused
from liveweight.integrations.vllm.client.connect import connect
from liveweight.integrations.vllm.client.replica import VllmReplica
from liveweight.integrations.vllm.handshake_terms import Verify
from liveweight.wire.credentials import Secret
from liveweight.wire.default_paths import default_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngine:
    """A vLLM among a publisher's engines; made by `vllm`."""

    given: Any
    address: str | None
    key: str | None
    loop: asyncio.AbstractEventLoop | None
    pace_bytes_per_s: float | None
    verify: Verify

    def replica(self, secret: Secret, secret_file: Path | None) -> VllmReplica:
        """The replica that a publisher drives. Its workers read the secret in that file, unless their environment names another."""
        controls = connect(self.given, key=self.key, loop=self.loop)
        name = getattr(controls, "url", None) or f"vLLM ({type(self.given).__name__})"
        # All trainers of one server derive the same address: the second finds the leader that the first one started.
        shared = hasattr(controls, "url")
        place = xxhash.xxh3_64_hexdigest(str(name).encode()) if shared else secrets.token_hex(8)
        address = self.address or f"ipc://{default_directory()}/vllm-{place}.sock"
        terms = {
            "address": address,
            "secret_file": None if secret_file is None else str(secret_file.absolute()),
            "pace_bytes_per_s": self.pace_bytes_per_s,
        }
        return VllmReplica(name, controls, address=address, secret=secret, terms=terms, verify=self.verify)


def vllm(
    engine: object,
    *,
    address: str | None = None,
    key: str | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    pace_bytes_per_s: float | None = None,
    verify: Verify = "staged",
) -> VllmEngine:
    """Name a vLLM among a publisher's engines: `lw.Publisher(model, engines=[lw.vllm("http://127.0.0.1:8000")])`.

    `engine` is a server's URL, an `LLM`, an `AsyncLLM` with the `loop` that it runs in, the handle of an actor of Ray that is one of these,
    or any object with the four methods of vLLM's weight sync clients. It was started with the weight transfer backend `liveweight`.
    `address` is where its worker 0 shall listen: by default a socket of this host, for another host `tcp://host:port`. `key` is the
    server's API key.
    `pace_bytes_per_s` is what staging may take of a worker, by default all that one thread can. `verify="installed"` lets every commit end
    with a comparison of what vLLM's model holds, where its layout can be read, with what was published, while vLLM stands still: a
    difference fails the round, and the version before is installed again. The report's `read` says of every replica which it was.
    """
    if verify not in get_args(Verify):
        raise Refused(f"verify is {verify!r}; it is one of {', '.join(get_args(Verify))}")
    return VllmEngine(
        given=engine,
        address=address,
        key=key,
        loop=loop,
        pace_bytes_per_s=pace_bytes_per_s,
        verify=verify,
    )
