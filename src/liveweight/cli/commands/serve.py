"""`liveweight serve`: the embedded engine behind HTTP, until a signal or a lost rank ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, TypeAlias

import typer

from liveweight.cli.commands.serve_settings import ServerSettings, settings_of
from liveweight.cli.exit_codes import DONE, RANK_LOST
from liveweight.cli.failures import error_line
from liveweight.cli.mode_option import mode_option
from liveweight.cli.secrets import ApiKey, ApiKeyFile, ControlKey, ControlKeyFile, SecretFile
from liveweight.errors import LiveWeightError, MissingExtra

if TYPE_CHECKING:
    from fastapi import APIRouter
    from prometheus_client import CollectorRegistry

    from liveweight.engine.config import EngineConfig
    from liveweight.observe.bus import Bus
    from liveweight.server.engine_port import EnginePort

    Start: TypeAlias = Callable[[EngineConfig, Bus], EnginePort]

_NEEDED = ("fastapi", "jinja2", "tokenizers", "torch", "uvicorn")


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="An HF checkpoint: Qwen3ForCausalLM or Qwen3MoeForCausalLM.")
]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share the model.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
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
LogprobsMode = Annotated[
    Literal["raw_logprobs", "processed_logprobs"],
    typer.Option(
        help="Of requests that name none: logprobs of the model's own distribution, or of the one that tokens are drawn from."
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each rank.")]
Grace = Annotated[float, typer.Option(min=0, help="Seconds that running requests have at the end.")]
BodyMb = Annotated[int, typer.Option(min=1, help="Larger requests are refused.")]
UpdatesOn = Annotated[bool, typer.Option("--updates/--no-updates", help="Take live weight updates.")]
Address = Annotated[
    str | None, typer.Option(help="Where publishers reach it; by default a socket of this process.")
]
From = Annotated[
    str | None,
    typer.Option(help="A source that offers weights, for updates that are asked for: see `update`, `offer`."),
]
AwaitWeights = Annotated[
    bool,
    typer.Option(
        "--await-weights",
        help="Take no requests before a publisher has brought a version: until then /health says pending_weights.",
    ),
]
Mode = Annotated[
    str | None,
    mode_option(
        "For updates that are asked for: what is offered over any other is refused, unless the request names it."
    ),
]
Kv = Annotated[
    Literal["recompute", "reuse", "drop"], typer.Option(help="What a commit does to running requests.")
]
DraftWeights = Annotated[
    Literal["required", "keep"],
    typer.Option(help="Where an offer has none of the MTP layer's tensors: refuse it, or keep the engine's."),
]
Shadow = Annotated[
    Literal["device", "host", "none"],
    typer.Option(
        help="Where new weights are staged: beside the old ones; in host memory, with a longer stall; or nowhere, in place: requests wait "
        "while the old ones are overwritten, and a failure half-way leaves nothing to serve until another update has come."
    ),
]
ChunkMb = Annotated[int, typer.Option(min=1, help="MB that are overwritten at a time, in place.")]
DraftChunkMb = Annotated[int, typer.Option(min=1, help="The same of the MTP layer's weights.")]
StagingThreads = Annotated[int, typer.Option(min=1, help="Threads of each rank that read new weights.")]
Hooks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Called with the model in every rank after every change of weights, the start included. May be repeated.",
    ),
]
Snapshots = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write the versions that are committed there, in the background, to come back to."
    ),
]
Every = Annotated[int | None, typer.Option(min=1, help="Write every so many commits.  [default: 1]")]
Keep = Annotated[int | None, typer.Option(min=1, help="Keep so many complete snapshots.  [default: 2]")]
RestartRanks = Annotated[
    bool,
    typer.Option(
        "--restart-ranks",
        help="Start ranks again when one is lost, and serve on at the version they had: of the newest snapshot, or of --weights-from.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Start from the newest snapshot, if there is one.")]
SleepDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Where weights are written while it sleeps; by default where temporary files are."
    ),
]
FastDeploy = Annotated[
    bool,
    typer.Option(
        "--fastdeploy",
        "--dynamic-load-weight",
        help="Speak FastDeploy's control interface; its two options below imply it.",
    ),
]
LoadStrategy = Annotated[
    str | None,
    typer.Option("--load-strategy", "--load_strategy", help="FastDeploy's: ipc, ipc_snapshot or rsync."),
]
RsyncConfig = Annotated[
    str | None, typer.Option("--rsync-config", "--rsync_config", metavar="JSON", help="FastDeploy's.")
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log every request.")]


def serve(
    directory: Directory,
    tp: Tp = 1,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    control_key: ControlKey = None,
    control_key_file: ControlKeyFile = None,
    updates: UpdatesOn = True,
    weights_address: Address = None,
    weights_from: From = None,
    await_weights: AwaitWeights = False,
    transfer_mode: Mode = None,
    secret_file: SecretFile = None,
    kv_policy: Kv = "recompute",
    draft_weights: DraftWeights = "required",
    shadow: Shadow = "device",
    chunk_mb: ChunkMb = 8,
    draft_chunk_mb: DraftChunkMb = 8,
    staging_threads: StagingThreads = 1,
    hook: Hooks = None,
    snapshots: Snapshots = None,
    snapshot_every: Every = None,
    keep_snapshots: Keep = None,
    restart_ranks: RestartRanks = False,
    resume: Resume = False,
    sleep_dir: SleepDir = None,
    fastdeploy: FastDeploy = False,
    load_strategy: LoadStrategy = None,
    rsync_config: RsyncConfig = None,
    served_name: Name = None,
    dtype: Dtype = "auto",
    context: Context = None,
    kv_mb: KvMb = 1024,
    max_running: Running = 64,
    max_waiting: Waiting = 4096,
    batch_tokens: BatchTokens = 512,
    overlap: Overlap = True,
    draft: Draft = True,
    prefix_cache: Prefixes = True,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    threads: Threads = 1,
    grace: Grace = 30.0,
    max_body_mb: BodyMb = 8,
    access_log: AccessLog = False,
) -> None:
    """Serve a checkpoint over OpenAI's HTTP interface.

    For example: liveweight serve ./model --tp 2 --port 8000
    """
    config, server_settings = settings_of(dict(locals()))
    # For the ranks, before they load UCX: otherwise UCX logs to our terminal.
    os.environ.setdefault("UCX_LOG_FILE", os.devnull)
    run(config, server_settings, _start)


def run(config: EngineConfig, server_settings: ServerSettings, start: Start) -> None:
    """Bind, start, serve, stop. Exits with RANK_LOST after a lost rank; raises the error that prevented the start."""
    try:
        from prometheus_client import CollectorRegistry

        from liveweight.server.server import bind
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    from liveweight.observe.log import logging_bus
    from liveweight.observe.metrics import MetricsReader

    bus, registry = logging_bus(), CollectorRegistry()
    if server_settings.access_log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        with (
            bind(server_settings.host, server_settings.port) as bound,
            bus.subscribe(MetricsReader(registry)),
            interruptible(),
            _started(config, start, bus) as engine,
        ):
            fault = asyncio.run(_serve(engine, server_settings, bound, registry))
    except KeyboardInterrupt:
        raise typer.Exit(DONE) from None  # a signal during the start: nothing was served yet
    if fault is not None:
        print(error_line(fault), file=sys.stderr)
        raise typer.Exit(RANK_LOST) from fault


async def _serve(
    engine: EnginePort, server_settings: ServerSettings, bound: socket.socket, registry: CollectorRegistry
) -> LiveWeightError | None:
    from liveweight.server.app import build_app
    from liveweight.server.request_guard import AccessRules
    from liveweight.server.server import ServerTimes, Shutdown, serve, url_of

    shutdown = Shutdown()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.request)
    access = AccessRules(
        api_key=server_settings.api_key,
        control_key=server_settings.control_key,
        max_body_bytes=server_settings.max_body_bytes,
    )
    first: list[APIRouter] = []
    if server_settings.fastdeploy is not None:
        from liveweight.integrations.fastdeploy import routes as fastdeploy

        first.append(fastdeploy.router_of(server_settings.fastdeploy))
        access = dataclasses.replace(access, control_paths=fastdeploy.PATHS)
        for note in server_settings.fastdeploy.notes:
            print(note, file=sys.stderr)
    app = build_app(engine, registry=registry, access=access, first=first)
    serving = ServerTimes(grace_s=server_settings.grace_s, access_log=server_settings.access_log)
    updates = "no updates" if engine.address is None else f"updates at {engine.address}"
    line = f"serving {engine.name} on {url_of(bound)}, tp {engine.config.tp}, {updates}"
    return await serve(engine, app, bound, serving, ready=lambda: print(line, flush=True), shutdown=shutdown)


def _start(config: EngineConfig, bus: Bus) -> EnginePort:
    try:
        from liveweight.engine.engine import Engine
        from liveweight.engine.recovery.restarting_engine import RestartingEngine
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    resumes = config.snapshots is not None and config.snapshots.resume
    kind = RestartingEngine if config.restarts is not None or resumes else Engine
    return kind(config, bus=bus)


@contextmanager
def _started(config: EngineConfig, start: Start, bus: Bus) -> Iterator[EnginePort]:
    engine = start(config, bus)
    try:
        yield engine
    finally:
        engine.stop(0.0)


@contextmanager
def interruptible() -> Iterator[None]:
    """Until the server handles signals itself, SIGTERM ends the start as Ctrl-C does, with everything released."""

    def interrupt(number: int, frame: object) -> NoReturn:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _missing(error: ModuleNotFoundError) -> Exception:
    """MissingExtra, with the pip line that helps, if the module belongs to the extra; else the error itself."""
    return MissingExtra("serving", "engine") if (error.name or "").partition(".")[0] in _NEEDED else error
