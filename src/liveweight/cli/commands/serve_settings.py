"""Turns the options of `liveweight serve` into the configuration of the engine and the settings of its HTTP server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from liveweight.cli.secrets import key_of
from liveweight.errors import EngineConfigInvalid
from liveweight.integrations.fastdeploy.settings import FastDeploySettings
from liveweight.integrations.fastdeploy.settings import settings_of as fastdeploy_settings
from liveweight.spec.decoders import converted

if TYPE_CHECKING:
    from liveweight.engine.config import EngineConfig, Snapshots, Updates

_AS_THEY_ARE = (
    *("served_name", "tp", "dtype", "context", "max_running", "threads"),
    *("max_waiting", "batch_tokens", "overlap", "draft", "prefix_cache", "logprobs_mode"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The HTTP server's settings, beside the engine's configuration."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    control_key: str | None = None
    max_body_bytes: int = 8 << 20
    grace_s: float = 30.0
    access_log: bool = False
    fastdeploy: FastDeploySettings | None = None


def settings_of(given: Mapping[str, Any]) -> tuple[EngineConfig, ServerSettings]:
    """Build both from the options by name. EngineConfigInvalid if options contradict each other."""
    from liveweight.engine.config import EngineConfig, Restarts

    server_settings = ServerSettings(
        host=given["host"],
        port=given["port"],
        api_key=key_of(given["api_key"], given["api_key_file"]),
        control_key=key_of(given["control_key"], given["control_key_file"], "control key"),
        max_body_bytes=given["max_body_mb"] << 20,
        grace_s=given["grace"],
        access_log=given["access_log"],
        fastdeploy=_fastdeploy(given),
    )
    options = {name: given[name] for name in _AS_THEY_ARE}
    options |= {"model": str(given["directory"]), "kv_bytes": given["kv_mb"] << 20}
    options |= {"hooks": tuple(given["hook"] or ())}
    options |= {"sleep_directory": None if given["sleep_dir"] is None else str(given["sleep_dir"].absolute())}
    config = converted(options, EngineConfig)
    updates = _updates(given)
    kept = {"snapshots": _snapshots(given), "restarts": Restarts() if given["restart_ranks"] else None}
    awaits = given["await_weights"]
    return msgspec.structs.replace(config, updates=updates, await_weights=awaits, **kept), server_settings


def _fastdeploy(given: Mapping[str, Any]) -> FastDeploySettings | None:
    strategy, rsync = given["load_strategy"], given["rsync_config"]
    wanted = given["fastdeploy"] or strategy is not None or rsync is not None
    return fastdeploy_settings(strategy, rsync, os.environ) if wanted else None


def _snapshots(given: Mapping[str, Any]) -> Snapshots | None:
    from liveweight.engine.config import Snapshots

    directory, every, keep = given["snapshots"], given["snapshot_every"], given["keep_snapshots"]
    if directory is None:
        for option, value in {"snapshot-every": every, "keep-snapshots": keep}.items():
            if value is not None:
                raise EngineConfigInvalid(
                    f"--{option} was given, and no directory for snapshots (--snapshots)"
                )
        if given["resume"]:
            raise EngineConfigInvalid(
                "--resume begins from a snapshot, and no directory of them was given (--snapshots)"
            )
        return None
    chosen = {"every": every, "keep": keep}
    options = {name: value for name, value in chosen.items() if value is not None}
    return Snapshots(directory=str(directory.absolute()), resume=given["resume"], **options)


def _updates(given: Mapping[str, Any]) -> Updates | None:
    from liveweight.engine.config import Updates
    from liveweight.wire.default_paths import default_directory, default_secret_file

    address, secret, source = given["weights_address"], given["secret_file"], given["weights_from"]
    transfer_mode = given["transfer_mode"]
    if not given["updates"]:
        off = {"weights address": address, "secret file": secret, "source of weights": source}
        off |= {"transfer mode": transfer_mode}
        for what, value in off.items():
            if value is not None:
                raise EngineConfigInvalid(f"a {what} was given, and live updates are off")
        return None
    if address is None:
        address = f"ipc://{default_directory()}/engine-{os.getpid()}.sock"
    return Updates(
        address=address,
        secret_file=str(default_secret_file() if secret is None else secret),
        source=source,
        transfer_mode=transfer_mode,
        kv_policy=given["kv_policy"],
        draft_weights=given["draft_weights"],
        shadow=given["shadow"],
        chunk_bytes=given["chunk_mb"] << 20,
        draft_chunk_bytes=given["draft_chunk_mb"] << 20,
        staging_threads=given["staging_threads"],
    )
