"""FastDeploy's settings of weight updates, as far as they apply to our engine: which transfer mode, and whether the cache makes room.

A setting maps to one of ours, or is not needed here (a note says why), or is unknown and refused by name. None is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from liveweight.errors import EngineConfigInvalid

LoadStrategy: TypeAlias = Literal["ipc", "ipc_snapshot", "rsync"]
ENVIRONMENT = ("FD_USE_CHECKPOINT_TRANSFER", "FD_USE_GDR_CHECKPOINT_TRANSFER")
_MODE_OF: Mapping[str, str] = {"ipc": "ipc", "ipc_snapshot": "ipc_snapshot", "rsync": "gdr"}
_NEEDLESS: Mapping[str, str] = {
    "gdr_debug_tensor_digest": "every update is digested and compared before it serves, unless a request says verify_checksum false",
    "gdr_mtp_chunk_size": "main model and draft change in one commit; chunks are for --shadow none (--draft-chunk-mb)",
    "gdr_prefetch_queue_size": "reads are queued ahead by themselves",
    "index": "ranks are told where to read",
    "group_size": "the engine knows its ranks",
    "device_name": "UCX chooses the network (UCX_NET_DEVICES)",
    "device": "UCX chooses the network (UCX_NET_DEVICES)",
    "redis_host": "the source is found by --weights-from",
    "redis_port": "the source is found by --weights-from",
    "qsize": "reads are queued ahead by themselves",
    "backend": "transfer_mode says it",
    "output_framework": "the engine has one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDeploySettings:
    """`transfer_mode` is the default for updates that name none; None is the source's mode. With `release_cache` the cache frees its memory
    before an update, for a trainer that shares the device. `notes` explain settings that are not needed."""

    transfer_mode: str | None = None
    release_cache: bool = False
    notes: tuple[str, ...] = ()


def settings_of(
    load_strategy: str | None, rsync_config: str | None, environ: Mapping[str, str]
) -> FastDeploySettings:
    """Translate FastDeploy's options and environment variables. EngineConfigInvalid names unknown or contradictory ones."""
    if load_strategy is not None and load_strategy not in _MODE_OF:
        raise EngineConfigInvalid(
            f"--load-strategy is one of {', '.join(get_args(LoadStrategy))}, not {load_strategy!r}"
        )
    given = {} if rsync_config is None else _parsed(rsync_config)
    release = given.pop("gdr_release_cache", False)
    if not isinstance(release, bool):
        raise EngineConfigInvalid("gdr_release_cache in --rsync-config is true or false")
    mode = _mode(load_strategy, given.pop("transfer_mode", None), given.pop("gpu_direct", None))
    unknown = sorted(set(given) - set(_NEEDLESS))
    if unknown:
        raise EngineConfigInvalid(f"unknown keys in --rsync-config: {', '.join(unknown)}")
    notes = [f"{key}: not needed here, {_NEEDLESS[key]}" for key in given]
    notes += [
        f"{name}: updates are always read straight from the source by the ranks, nothing has to be turned on"
        for name in ENVIRONMENT
        if environ.get(name, "0") not in ("", "0")
    ]
    return FastDeploySettings(transfer_mode=mode, release_cache=release, notes=tuple(notes))


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise EngineConfigInvalid(f"--rsync-config is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise EngineConfigInvalid("--rsync-config is no JSON object")
    return given


def _mode(strategy: str | None, mode: object, direct: object) -> str | None:
    """The transfer mode: as it is named, or as `gpu_direct` or the strategy implies."""
    if mode is not None and mode not in ("gdr", "rdma", "ipc", "ipc_snapshot"):
        raise EngineConfigInvalid(
            f"transfer_mode in --rsync-config is gdr, rdma, ipc or ipc_snapshot, not {mode!r}"
        )
    if direct is not None and not isinstance(direct, bool):
        raise EngineConfigInvalid("gpu_direct in --rsync-config is true or false")
    implied = None if direct is None else "gdr" if direct else "rdma"
    if None not in (mode, implied) and mode != implied and mode in ("gdr", "rdma"):
        raise EngineConfigInvalid(
            f"transfer_mode {mode} and gpu_direct {str(direct).lower()} contradict each other"
        )
    return str(mode) if mode is not None else implied or (None if strategy is None else _MODE_OF[strategy])
