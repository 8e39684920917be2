"""`liveweight serve`: the embedded engine behind HTTP, until a signal or a lost rank ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import msgspec
import typer

from liveweight.errors import EngineConfigInvalid, LiveWeightError, MissingExtra

if TYPE_CHECKING:
    from liveweight.control.port import Engine
    from liveweight.engine.config import EngineConfig

RANK_LOST = 3
"""The exit code after a rank was lost; 0 after a signal, 1 where it could not start."""
_NEEDED = ("fastapi", "jinja2", "tokenizers", "torch", "uvicorn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What the server is told beside the engine's configuration."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    grace_s: float = 30.0
    access_log: bool = False


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="An HF checkpoint: Qwen3ForCausalLM or Qwen3MoeForCausalLM.")
]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share the model.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="LIVEWEIGHT_API_KEY", help="Clients must show it. Other users can see arguments."),
]
KeyFile = Annotated[Path | None, typer.Option(help="A file that holds the key.")]
Name = Annotated[str | None, typer.Option(help="The model's name; by default its directory's.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the weights; auto is the checkpoint's.")
]
Context = Annotated[int | None, typer.Option(min=2, help="Tokens of a prompt and its answer together.")]
KvMb = Annotated[int, typer.Option(min=1, help="MB for the KV cache, of all ranks together.")]
Running = Annotated[int, typer.Option(min=1, help="Requests in one step, at most.")]
Waiting = Annotated[int, typer.Option(min=0, help="Requests that may wait; more are refused.")]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens in one step, at most.")]
Overlap = Annotated[bool, typer.Option("--overlap/--no-overlap", help="Schedule a step ahead.")]
Draft = Annotated[bool, typer.Option("--draft/--no-draft", help="Use the model's MTP layer, if it has one.")]
Prefixes = Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Share common beginnings.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each rank.")]
Grace = Annotated[float, typer.Option(min=0, help="Seconds that running requests have at the end.")]
BodyMb = Annotated[int, typer.Option(min=1, help="Larger requests are refused.")]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log every request.")]


def serve(
    directory: Directory,
    tp: Tp = 1,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    api_key: Key = None,
    api_key_file: KeyFile = None,
    served_name: Name = None,
    dtype: Dtype = "auto",
    context: Context = None,
    kv_mb: KvMb = 1024,
    max_running: Running = 64,
    max_waiting: Waiting = 1024,
    batch_tokens: BatchTokens = 512,
    overlap: Overlap = True,
    draft: Draft = True,
    prefix_cache: Prefixes = True,
    threads: Threads = None,
    grace: Grace = 30.0,
    max_body_mb: BodyMb = 8,
    access_log: AccessLog = False,
) -> None:
    """Serve a checkpoint over OpenAI's HTTP interface."""
    from liveweight.engine.config import EngineConfig

    key, body = _key(api_key, api_key_file), max_body_mb << 20
    address = {"host": host, "port": port, "api_key": key}
    limits = {"max_body_bytes": body, "grace_s": grace, "access_log": access_log}
    model = {"model": str(directory), "served_name": served_name, "tp": tp, "dtype": dtype}
    sizes = {"context": context, "kv_bytes": kv_mb << 20, "max_running": max_running, "threads": threads}
    queue = {"max_waiting": max_waiting, "batch_tokens": batch_tokens}
    switches = {"overlap": overlap, "draft": draft, "prefix_cache": prefix_cache}
    config = msgspec.convert({**model, **sizes, **queue, **switches}, EngineConfig)
    run(config, msgspec.convert({**address, **limits}, Front), _start)


def run(config: EngineConfig, front: Front, start: Callable[[EngineConfig], Engine]) -> None:
    """Bind, start, serve, stop. Exits with a code of its own after a lost rank; raises what kept it from starting."""
    try:
        from liveweight.control.server import bind
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if front.access_log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        with bind(front.host, front.port) as bound, _interruptible(), _started(config, start) as engine:
            fault = asyncio.run(_serve(engine, front, bound))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # a signal while it started: nothing was served yet
    if fault is not None:
        print(f"{fault.code} {fault}\n{fault.remedy}", file=sys.stderr)
        raise typer.Exit(RANK_LOST)


async def _serve(engine: Engine, front: Front, bound: socket.socket) -> LiveWeightError | None:
    from prometheus_client import CollectorRegistry

    from liveweight.control.app import build_app
    from liveweight.control.guard import Access
    from liveweight.control.server import Ending, Serving, serve, url_of

    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.ask)
    access = Access(api_key=front.api_key, max_body_bytes=front.max_body_bytes)
    app = build_app(engine, registry=CollectorRegistry(), access=access)
    serving = Serving(grace_s=front.grace_s, access_log=front.access_log)
    line = f"serving {engine.name} on {url_of(bound)}, tp {engine.config.tp}"
    return await serve(engine, app, bound, serving, ready=lambda: print(line, flush=True), ending=ending)


def _start(config: EngineConfig) -> Engine:
    try:
        from liveweight.engine.engine import Engine
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return Engine(config)


@contextmanager
def _started(config: EngineConfig, start: Callable[[EngineConfig], Engine]) -> Iterator[Engine]:
    engine = start(config)
    try:
        yield engine
    finally:
        engine.stop(0.0)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Until the server takes signals itself, SIGTERM ends the start as Ctrl-C does: with everything released."""

    def interrupt(number: int, frame: object) -> NoReturn:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _missing(error: ModuleNotFoundError) -> Exception:
    """The pip line that helps; the error itself, if it is about something else."""
    return MissingExtra("serving", "engine") if (error.name or "").partition(".")[0] in _NEEDED else error


def _key(given: str | None, file: Path | None) -> str | None:
    """The key from its argument, the environment or a file; not from two of them, and not an empty one."""
    if given is not None and file is not None:
        raise EngineConfigInvalid("the key is given twice, by itself and by a file")
    if file is not None:
        try:
            given = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineConfigInvalid(f"the key's file {file} cannot be read: {error}") from error
    if given is not None and not given.strip():
        raise EngineConfigInvalid("the key is empty")
    return given
