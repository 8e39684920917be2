"""Tells the generation when the trainer's weights changed: a callback among TRL's own. Imports transformers: loaded by `attach`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from liveweight.integrations.trl.generation import EngineGeneration


class WeightsChangedCallback(TrainerCallback):
    """TRL itself compares step numbers, which begin anew with every `train()`."""

    def __init__(self, generation: EngineGeneration) -> None:
        self._generation = generation

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """A checkpoint may have been loaded, and a model may have been prepared anew."""
        self._generation.weights_changed()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimiser step was made."""
        self._generation.weights_changed()
