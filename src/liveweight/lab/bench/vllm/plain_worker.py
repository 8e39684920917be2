"""What a benchmark does in vLLM's workers, as an extension of theirs: updates as plain backends do them, without staging.

Four phases while vLLM is paused: begin, buckets, end. A bucket is a file in shared memory that the trainer has just written; it is loaded
into the model as it comes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


class Plain:
    """Becomes a base of vLLM's worker: `self` is the worker. Called on all workers by `/collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    model_config: Any

    def plain_start(self) -> None:
        """Begin: layers wait for their weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def plain_bucket(self, path: str, table: str) -> None:
        """Load the tensors of one bucket: [name, dtype, shape, offset] each."""
        from vllm.config import set_current_vllm_config

        pages = torch.from_file(path, shared=False, size=Path(path).stat().st_size, dtype=torch.uint8)
        tensors = []
        for name, dtype, shape, offset in json.loads(table):
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            part = pages[offset : offset + like.numel() * like.element_size()]
            tensors.append((name, part.view(like.dtype).view(like.shape)))
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.model.load_weights(tensors)

    def plain_finish(self) -> None:
        """End: what layers are made of besides their weights is made anew."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
