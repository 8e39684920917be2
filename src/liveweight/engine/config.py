"""The engine's configuration: one frozen value, made at the edge, handed down and sent to every rank."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from liveweight.engine.rank.hooks import check_name
from liveweight.engine.serving.requests import LogprobsMode
from liveweight.errors import EngineConfigInvalid
from liveweight.transports.registry import check_installed, mode
from liveweight.transports.snapshot.disk.parts import PART_BYTES
from liveweight.wire.messages.values import KvPolicy
from liveweight.worker.staging import BATCH_BYTES

DraftWeights: TypeAlias = Literal["required", "keep"]
"""Whether an offer must have the draft's tensors, or the engine may keep its own."""


class Updates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine takes live updates: where publishers and ranks find its leader, and what a round may cost the ranks.

    `kv_policy` is for commits whose publisher names none. `draft_weights` says what happens where an offer has none of the MTP
    layer's tensors: it is refused, or the draft stays as it is. `shadow` is where each rank keeps the second copy of its weights; with
    `none` there is none, and a commit overwrites the weights, `chunk_bytes` at a time, those of the MTP layer `draft_chunk_bytes`.
    `source` is where an operator's updates are read from, `transfer_mode` how, unless a request names one; None: as the source offers.
    """

    address: str
    secret_file: str
    source: str | None = None
    transfer_mode: str | None = None
    kv_policy: KvPolicy = "recompute"
    draft_weights: DraftWeights = "required"
    shadow: Literal["device", "host", "none"] = "device"
    staging_threads: int = 1
    pace_bytes_per_s: float | None = None
    chunk_bytes: int = BATCH_BYTES
    draft_chunk_bytes: int = BATCH_BYTES

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.draft_chunk_bytes < 1:
            raise EngineConfigInvalid("chunks of weights must have at least one byte")
        if self.source is not None and not self.source.startswith(("ipc://", "tcp://")):
            raise EngineConfigInvalid(
                f"a source of weights is at ipc://path or tcp://host:port, not at {self.source!r}"
            )
        if self.transfer_mode is not None:
            if self.source is None:
                raise EngineConfigInvalid(
                    f"updates that are asked for are to come over {self.transfer_mode}, and no source of them was given"
                )
            check_installed(mode(self.transfer_mode))


class Snapshots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine keeps the versions that it serves, in files: it writes one after `every` commits, and keeps the last `keep`.

    `resume`: it starts from the newest that is complete. `timeout_s` is for writing one. The engine sets `address` itself: its
    ranks connect there to receive what to write.
    """

    directory: str
    every: int = 1
    keep: int = 2
    resume: bool = False
    part_bytes: int = PART_BYTES
    timeout_s: float = 600.0
    address: str = ""

    def __post_init__(self) -> None:
        for name in ("every", "keep", "part_bytes"):
            if getattr(self, name) < 1:
                raise EngineConfigInvalid(f"{name} of snapshots must be at least 1")


class Restarts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often an engine restarts its ranks after losing one: at most `limit` times within `window_s`, and `attempts` times in a row
    without serving. After a failed start it waits `wait_s`, then twice as long each time."""

    limit: int = 20
    window_s: float = 600.0
    attempts: int = 3
    wait_s: float = 1.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is started with. Sizes that are None follow from the model or the machine.

    `threads` are torch's, of each rank: more than one pays only on an idle machine; on a busy one they wait for each other and cost a
    multiple. `kv_bytes` is shared by all ranks; `batch_tokens` bounds one step and so the chunk of a prompt that is filled at once;
    `draft` turns speculative decoding by the checkpoint's MTP layer on, where it has one. `logprobs_mode` is for requests that name
    none. `hooks`, each a
    `module:function` that ranks import and call with their model, follow every change of weights, also the load at the start. Without
    `updates` the weights stay as they were loaded; with `await_weights` no request is taken before a publisher has brought a version.
    Without `restarts` the engine ends with the first rank that is lost. Weights of an engine that sleeps lie below `sleep_directory`; None:
    where the system has temporary files.
    """

    model: str
    served_name: str | None = None
    tp: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    threads: int = 1
    context: int | None = None
    block_tokens: int = 16
    kv_bytes: int = 1 << 30
    max_running: int = 64
    max_waiting: int = 4096
    batch_tokens: int = 512
    overlap: bool = True
    prefix_cache: bool = True
    draft: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    hooks: tuple[str, ...] = ()
    updates: Updates | None = None
    await_weights: bool = False
    snapshots: Snapshots | None = None
    restarts: Restarts | None = None
    sleep_directory: str | None = None
    start_timeout_s: float = 300.0
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("tp", "threads", "block_tokens", "kv_bytes", "max_running", "batch_tokens"):
            if getattr(self, name) < 1:
                raise EngineConfigInvalid(f"{name} must be at least 1")
        for hook in self.hooks:
            check_name(hook)
        if self.await_weights and self.updates is None:
            raise EngineConfigInvalid("weights are awaited from a publisher, and live updates are off")
        if self.snapshots is not None and self.updates is None:
            raise EngineConfigInvalid(
                "snapshots are of versions that were published, and live updates are off"
            )
        if self.max_waiting < 0:
            raise EngineConfigInvalid("max_waiting must not be negative")
        if self.batch_tokens < 2 * self.max_running:
            raise EngineConfigInvalid(
                f"batch_tokens ({self.batch_tokens}) must be at least twice max_running ({self.max_running}): "
                "a step holds one token and one draft of every running request"
            )
