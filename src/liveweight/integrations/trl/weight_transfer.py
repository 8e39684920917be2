"""`WeightTransfer`: the `weight_transfer` of TRL's AsyncGRPOTrainer, over a publisher. TRL calls it at the main process only.

Owns the labels of what TRL sends, and which of the model's tensors TRL does not send. Rollouts are TRL's rollout worker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from liveweight.api import Publisher
from liveweight.errors import TrainerRefused, WrongState
from liveweight.integrations.connect import Engine
from liveweight.rounds.report import Report
from liveweight.spec.tensor_names import clean
from liveweight.trainer.sources.kept_tensors import Keep
from liveweight.trainer.sources.tensors import is_distributed

if TYPE_CHECKING:
    import torch


class WeightTransfer:
    """Publishes what an AsyncGRPOTrainer sends; engines install all of it, verified, or nothing, and serve meanwhile.

        model = AutoModelForCausalLM.from_pretrained(...)
        AsyncGRPOTrainer(model, ..., weight_transfer=WeightTransfer(engines=["http://127.0.0.1:8000"], model=model))

    TRL sends only parameters that require a gradient. With `model`, engines keep their own of the others, if these are the model's:
    KeptDiffers names those that differ, before the first sync; under FSDP2 they must be what the engine was started with. `keep` says it
    in other ways, as that of `lw.Publisher`, whose further arguments are `publisher_options`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        model: torch.nn.Module | None = None,
        keep: Keep | None = None,
        **publisher_options: Any,
    ) -> None:
        """Does not reach the engines yet."""
        if model is not None and keep is not None:
            raise TrainerRefused("model= and keep=: the model says what is kept; give one of them")
        taken = sorted({"group", "address", "dtype"} & publisher_options.keys())
        if taken:
            raise TrainerRefused(
                f"{', '.join(taken)}: not for a transfer that TRL's main process makes alone"
            )
        self._engines, self._model, self._keep, self._options = engines, model, keep, publisher_options
        self._sent = 0
        self.publisher: Publisher | None = None
        """The publisher; None before the training begins and after it has ended."""
        self.report: Report | None = None
        """Of the version that was sent last."""

    def init_weight_transfer(self) -> None:
        """Reach the engines, and compare what they keep. TRL calls it when the training begins."""
        if self.publisher is None:
            keep = _frozen(self._model) if self._model is not None else self._keep
            self.publisher = Publisher(engines=self._engines, keep=keep, **self._options)

    def pause(self) -> None:
        """Nothing: engines serve while weights are sent, and stop for the installation only."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish what the iterator gives, as `version_1`, `version_2`, ...: while nothing fails, TRL's `model_version` after it.

        Returns when all engines serve it. Raises otherwise: engines serve the version before, and TRL must not count this one. The
        iterator is run to its end in any case, because it is a collective of the trainer's processes.
        """
        self._sent += 1
        if self.publisher is None:
            for _ in iterator:
                pass
            raise WrongState(
                "without engines, before init_weight_transfer or after destroy", "sending weights"
            )
        self.report = self.publisher.publish(f"version_{self._sent}", tensors=iterator)

    def resume(self) -> None:
        """Nothing: see `pause`."""

    def destroy(self) -> None:
        """Close the publisher; the engines serve on. TRL calls it when the training ends."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()


def _frozen(model: torch.nn.Module) -> Keep | None:
    """What TRL does not send of a model: parameters without a gradient, but of a PEFT model nothing. Their names alone, if this process
    may hold a part of them only."""
    if hasattr(model, "peft_config"):
        return None
    frozen = {clean(name): one.detach() for name, one in model.named_parameters() if not one.requires_grad}
    if not frozen:
        return None
    return list(frozen) if any(map(is_distributed, frozen.values())) else frozen
