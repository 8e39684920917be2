"""The weight transfer backend that vLLM creates in every worker: translates vLLM's calls into calls of our rank (workers/rank).

The worker's main thread calls the constructor and every method, on all workers alike. Only `update_weights` changes weights, a whole
version at a time; `start_weight_update` and `finish_weight_update` do nothing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from liveweight.checkpoint import CheckpointSource
from liveweight.errors import EngineConfigInvalid, WrongState
from liveweight.integrations.vllm.draft_model import METHOD, PREFIX, load_both, optional, prefixed, with_draft
from liveweight.integrations.vllm.handshake_terms import HandshakeTerms, Verify
from liveweight.integrations.vllm.workers import compat
from liveweight.integrations.vllm.workers.install import Installer, Tensors
from liveweight.integrations.vllm.workers.rank import Loading, VllmRank, WorkerSeat
from liveweight.integrations.vllm.workers.target import Named
from liveweight.integrations.vllm.workers.trace_loading import TracedCopy
from liveweight.rounds.boundary import Decision
from liveweight.spec.manifest import Manifest
from liveweight.wire.credentials import load_or_create_secret
from liveweight.wire.default_paths import default_secret_file

compat.check_version(vllm.__version__)

SECRET_FILE = "LIVEWEIGHT_SECRET_FILE"
UNUSED = (".rotary_emb.inv_freq",)
"""Suffixes of names that old checkpoints have and no model loads. Trainers need not offer these tensors."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a trainer sends in its handshake: see HandshakeTerms."""

    address: str
    session: str
    secret_file: str | None = None
    pace_bytes_per_s: float | None = None
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The decision of the leader with that boot id, passed on by the trainer: all workers swap at the same step. `verify`: what the swap
    verifies."""

    boot: str
    epoch: int
    undo: bool = False
    timeout_s: float = 60.0
    verify: Verify = "staged"


def _used(source: CheckpointSource) -> Manifest:
    return Manifest(tensors=tuple(spec for spec in source.manifest() if not spec.name.endswith(UNUSED)))


class LiveweightBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's backend. Does nothing until a trainer's handshake."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    _rank: VllmRank | None = None
    _main: Installer
    _draft: Installer | None = None
    """Installs the draft model, once vLLM has handed it over."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Become a rank that the trainer reaches over our wire. May be called again, by another trainer or after a failure."""
        terms = HandshakeTerms(
            address=init_info.address,
            session=init_info.session,
            pace_bytes_per_s=init_info.pace_bytes_per_s,
            timeout_s=init_info.timeout_s,
        )
        if self._rank is None:
            named = os.environ.get(SECRET_FILE) or init_info.secret_file
            secret = load_or_create_secret(default_secret_file() if named is None else Path(named))
            self._rank = VllmRank(self._seat(), self._loading(), terms, secret)
        self._rank.handshake(terms)

    def _seat(self) -> WorkerSeat:
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1:
            raise EngineConfigInvalid(
                f"data_parallel_size {parallel.data_parallel_size}: start one vLLM for each, and name them all as engines"
            )
        if compat.offloads(self.vllm_config):
            raise EngineConfigInvalid(
                "vLLM offloads weights to host memory and copies them back at every step: installed weights would not last"
            )
        local_world = getattr(parallel, "local_world_size", parallel.world_size)
        return WorkerSeat(
            rank=parallel.rank,
            world=parallel.world_size,
            local_rank=parallel.rank % local_world,
            local_world=local_world,
            vllm=self.vllm_config.instance_id,
        )

    def _loading(self) -> Loading:
        source, drafts = self._checkpoint(self.model_config), self._draft_checkpoint()
        used = _used(source)
        self._main = Installer(self._default_model, self._default_model_config, used)
        manifest = with_draft(used, None if drafts is None else _used(drafts))
        return Loading(
            manifest=manifest,
            optional=optional(manifest),
            load=self._load,
            restore=self._restore,
            start=lambda: itertools.chain(
                source.tensors(), () if drafts is None else prefixed(drafts.tensors())
            ),
            learn=self._learn,
            places=self._places,
        )

    def _checkpoint(self, model_config: Any) -> CheckpointSource:
        return CheckpointSource(compat.checkpoint_directory(model_config, self.vllm_config.load_config))

    def _draft_checkpoint(self) -> CheckpointSource | None:
        """The draft model's checkpoint, if it has one of its own; other draft models are not updated."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or speculative.method != METHOD:
            return None
        return self._checkpoint(speculative.draft_model_config)

    def _load(self, tensors: Named) -> None:
        load_both(tensors, self._main.load, None if self._draft is None else self._draft.load)

    def _restore(self) -> None:
        self._main.restore()
        if self._draft is not None:
            self._draft.restore()

    def _places(self) -> Iterable[TracedCopy]:
        yield from self._main.places()
        if self._draft is not None:
            for place in self._draft.places():
                yield replace(place, tensor=PREFIX + place.tensor)

    def _learn(self, installed: Tensors) -> None:
        self._main.learn(installed)
        if self._draft is not None:
            self._draft.learn(lambda name: installed(PREFIX + name))

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """Called by vLLM to hand the draft model over. From then on every version installs both models."""
        checkpoint = self._draft_checkpoint()
        if checkpoint is None:
            raise EngineConfigInvalid(
                f"only a draft model with a checkpoint of its own (the method {METHOD}) can be updated"
            )
        if self._draft is None:
            self._draft = Installer(model, model_config, _used(checkpoint))

    def start_weight_update(self) -> None:
        """Nothing to prepare: `update_weights` installs the whole staged version."""
        if self._rank is None:
            raise WrongState("without a trainer's handshake", "an update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install the staged version, or undo. If all workers are back on their old version after a failure, the leader reports the failure
        to the trainer, and nothing is raised here."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See update_weights."""
        if self._rank is None:
            raise WrongState("without a trainer's handshake", "an update")
        decision = Decision(update_info.epoch, update_info.undo, update_info.timeout_s)
        self._rank.swap(decision, boot=update_info.boot, verify=update_info.verify)

    def finish_weight_update(self) -> None:
        """Nothing left to do."""

    def shutdown(self) -> None:
        """Leave the replica; vLLM serves on with its current weights."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
