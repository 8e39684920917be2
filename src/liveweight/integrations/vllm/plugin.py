"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process, before it loads a model. Imports no backend yet."""

from __future__ import annotations

BACKEND = "liveweight"
"""The name in `--weight-transfer-config '{"backend": "liveweight"}'`."""


def register() -> None:
    """Register the backend's name; vLLM imports the backend where it is configured. May be called twice."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # this vLLM has no weight transfer backends
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "liveweight.integrations.vllm.workers.backend", "LiveweightBackend"
        )
