"""vLLM's own trainer-side interface over our rounds: `trainer_init` and `send_weights`, for programs that drive vLLM from there.

    from liveweight.integrations.vllm.trainer import TrainerInit

    engine = WeightTransferTrainerFactory.trainer_init(TrainerInit(rank=rank), client=client, source=source)
    engine.send_weights()

Importing this module registers the backend. Every rank of the trainer runs every line; rank 0 alone calls vLLM. Only the backend's name
differs from vLLM's own examples. `send_weights` returns once vLLM serves the weights; if it raises, vLLM serves those of before.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from liveweight.errors import Refused
from liveweight.integrations.vllm.engine import vllm
from liveweight.integrations.vllm.plugin import BACKEND
from liveweight.rounds.report import Report
from liveweight.trainer.local_publisher import publishing_to
from liveweight.trainer.sources.gathering_source import GatheringSource
from liveweight.wire.credentials import load_or_create_secret, socket_directory
from liveweight.wire.default_paths import default_directory, default_secret_file


@dataclass
class TrainerInit(TrainerInitInfo):
    """One trainer rank's settings. `secret_file` must be the one that vLLM's workers use; by default the user's own."""

    backend: ClassVar[str] = BACKEND
    secret_file: str | None = None
    timeout_s: float = 300.0


class LiveweightTrainer(TrainerWeightTransferEngine[TrainerInit]):
    """vLLM's trainer interface on one rank. Called by one thread."""

    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> Self:
        """Connect to vLLM on rank 0, and compare names, dtypes and shapes. Called on every rank."""
        if source is None:
            raise Refused("whole versions are published: a source of all tensors is needed")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._connect(init_info)
        return engine

    def _connect(self, info: TrainerInit) -> None:
        metadata = [(entry.name, entry.dtype, entry.shape) for entry in self.source.metadata()]
        self._passes = GatheringSource(metadata, lambda: iter(self.source))
        self._resources, self._steps = ExitStack(), itertools.count(1)
        self.report: Report | None = None
        """The report of the last update; None on ranks that sent none."""
        if not self.is_sender:
            return
        file = default_secret_file() if info.secret_file is None else Path(info.secret_file)
        secret = load_or_create_secret(file)
        self._publisher = publishing_to(
            [vllm(self.client).replica(secret, file)],
            self._passes,
            name="vllm trainer",
            directory=socket_directory(default_directory()),
            secret=secret,
            timeout_s=info.timeout_s,
            stack=self._resources,
        ).publisher

    def send_weights(self) -> None:
        """One update. Every rank runs the source to its end, whatever happens: its iteration may be a collective."""
        if not self.is_sender:
            self._passes.exhaust()
            return
        with self._passes.owed():
            self.report = self._publisher.publish(next(self._steps))

    def shutdown(self) -> None:
        """Disconnect from vLLM, which serves on."""
        self._resources.close()


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, LiveweightTrainer)
