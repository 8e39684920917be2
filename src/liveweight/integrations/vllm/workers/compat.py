"""Everything that depends on vLLM's version, in one place: which versions are known, and the calls that load weights into a model.

Known are 0.28 to 0.32, which have the same contract. Another is refused in one line, before anything is touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from liveweight.errors import ManifestInvalid, Unavailable

FIRST, LAST = (0, 28), (0, 32)


def check_version(version: str) -> None:
    """Unavailable unless it is a version whose contract is known."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not FIRST <= number <= LAST:
        known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
        raise Unavailable(
            f"vLLM {version}: its weight transfer is not known to liveweight, which knows {known}"
        )


def offloads(vllm_config: Any) -> bool:
    """Whether weights are kept in host memory, from where vLLM copies them at every step: a reload does not reach them there."""
    offload = vllm_config.offload_config
    return bool(offload.prefetch.offload_group_size or offload.uva.cpu_offload_gb)


def load(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all tensors of a checkpoint into a model that serves, layer by layer, into the memory that its layers have.

    If it raises, layers are in pieces: `restore` puts back what there was before, and weights have to be loaded again.
    """
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    _forget_kernels_of_experts(model)
    initialize_layerwise_reload(model)
    with torch.no_grad(), disable_mtp_completeness_check():
        model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    _pack_shared_weights_again(model)


def after_loading(model: Any, model_config: Any) -> None:
    """What vLLM does once all weights are there, wherever they came from: attention looks at what it has."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(model_config.dtype)


def _pack_shared_weights_again(model: Any) -> None:
    """On a CPU vLLM packs a layer's weights when it has loaded them. A head that shares those of the embeddings is given none when
    weights are loaded again, and would go on with the old ones, packed."""
    holders: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            holders.setdefault(weight.data_ptr(), []).append(layer)
    for layers in holders.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _forget_kernels_of_experts(model: Any) -> None:
    """On a CPU vLLM packs the weights of experts when their kernel is made, and not when weights are loaded into it again: the kernel
    would read unpacked ones as packed. Without its kernel a layer is made as at first."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        first = next(layer.parameters(), None)
        on_cpu = first is not None and first.device.type == "cpu"
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def restore(model: Any, model_config: Any) -> None:
    """Let every layer have its own tensors again, after a `load` that raised. Their content is of both versions."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # begun and not ended: without weights of its own it gets its tensors back
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


def checkpoint_directory(model_config: Any, load_config: Any) -> Path:
    """Where the checkpoint lies that vLLM was started from; ManifestInvalid where it is not on this host."""
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except Exception as error:  # the hub has a dozen kinds of them
        raise ManifestInvalid(f"the checkpoint {model_config.model} is not on this host: {error}") from error
    return Path(found)
