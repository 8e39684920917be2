"""Hooks: one ordered list of functions that run after every change of a rank's weights.

The load at the start, a commit, an undo and the rollback of a failed commit all run this list, on every rank, before a step runs on
the weights. Nothing else runs after a change. First come the engine's own hooks, then the user's, in their order.
checkpoint_loading and worker/commit run the list; KV policy and routing replay are the scheduler's, after all ranks have run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, TypeAlias

from liveweight.errors import EngineConfigInvalid, LiveWeightError, Unavailable

if TYPE_CHECKING:
    from liveweight.engine.models.model import Model
    from liveweight.worker.commit import Hook

ModelHook: TypeAlias = "Callable[[Model], object]"
"""Called with the rank's model, on its main thread, while no step runs. May raise: then all ranks go back to the weights before."""


def derive(model: Model) -> Callable[[], object]:
    """Post-processing: every module computes anew what it keeps of its weights in another form."""
    from liveweight.engine.models.derive import Deriving

    parts = [
        part for part in model.modules() if isinstance(part, Deriving)
    ]  # looked for once, not at every commit

    def run() -> None:
        for part in parts:
            part.derive()

    return run


BUILT_IN: Mapping[str, Callable[[Model], Callable[[], object]]] = {"derive": derive}
"""The engine's own, by name, in order: each is made for a model."""


def hooks_of(model: Model, given: Sequence[str] = ()) -> tuple[Hook, ...]:
    """The whole list for one rank: the engine's own, then those that are given as `module:function`.

    EngineConfigInvalid for one that cannot be imported.
    """
    named = [(name, make(model)) for name, make in BUILT_IN.items()]
    named += [(text, partial(_imported(text), model)) for text in given]
    return tuple(partial(_run, name, hook) for name, hook in named)


def check_name(text: str) -> None:
    """Refuse what is not written as `module:function`."""
    module, colon, function = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        raise EngineConfigInvalid(f"a hook is written as module:function, not {text!r}")


def _imported(text: str) -> ModelHook:
    module, _, function = text.partition(":")
    try:
        hook = reduce(getattr, function.split("."), importlib.import_module(module))
    except (
        Exception
    ) as error:  # the user's module is foreign code: whatever it raises, the start says which hook it was
        raise EngineConfigInvalid(f"hook {text}: {type(error).__name__}: {error}") from error
    if not callable(hook):
        raise EngineConfigInvalid(f"hook {text} is no function but a {type(hook).__name__}")
    return hook


def _run(name: str, hook: Callable[[], object]) -> None:
    import torch

    try:
        with torch.no_grad():
            hook()
    except LiveWeightError:
        raise
    except Exception as error:
        raise Unavailable(f"hook {name} failed: {type(error).__name__}: {error}") from error
