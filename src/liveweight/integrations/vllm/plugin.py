"""The entry point `vllm.general_plugins`: vLLM calls it in every process, before it loads a model. It registers; it loads nothing."""

from __future__ import annotations

BACKEND = "liveweight"
"""The name in `--weight-transfer-config '{"backend": "liveweight"}'`."""


def register() -> None:
    """Let vLLM know the backend by name; vLLM imports it where it is asked for. Twice is fine."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM without such backends, which cannot ask for one
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "liveweight.integrations.vllm.workers.backend", "LiveweightBackend"
        )
