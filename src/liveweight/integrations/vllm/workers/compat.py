"""Everything that depends on vLLM's version: which versions are supported, and the calls that load weights into a model.

Supported are 0.28 to 0.32, which have the same contract. Any other version is refused before anything is touched.
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
    """Raises Unavailable unless the version is supported."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not FIRST <= number <= LAST:
        known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
        raise Unavailable(
            f"vLLM {version}: its weight transfer is not known to liveweight, which knows {known}"
        )


def offloads(vllm_config: Any) -> bool:
    """Whether vLLM keeps weights in host memory and copies them at every step. A reload does not reach those copies."""
    offload = vllm_config.offload_config
    return bool(offload.prefetch.offload_group_size or offload.uva.cpu_offload_gb)


def load(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load all tensors of a checkpoint into a serving model, layer by layer, into the memory of its layers.

    If it raises, layers are half loaded: call `restore`, then load weights again.
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
    """Run vLLM's processing that follows any loading: attention layers process their weights."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(model_config.dtype)


def _pack_shared_weights_again(model: Any) -> None:
    """Pack tied weights again. On a CPU vLLM packs a layer's weights when it has loaded them. A head that shares the embedding's weights
    gets none in a reload, and would go on with the old ones, packed."""
    holders: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(layer, "cpu_linear"):
            holders.setdefault(weight.data_ptr(), []).append(layer)
    for layers in holders.values():
        for layer in layers if len(layers) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _forget_kernels_of_experts(model: Any) -> None:
    """Drop the kernels of experts. On a CPU vLLM packs the weights of experts when it makes their kernel, and not in a reload: the old
    kernel would read unpacked weights as packed. A layer without a kernel gets a new one."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        first = next(layer.parameters(), None)
        on_cpu = first is not None and first.device.type == "cpu"
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def restore(model: Any, model_config: Any) -> None:
    """Give every layer its own tensors back after a `load` that raised. Their content is a mixture of both versions."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if (
            info.can_load()
        ):  # begun and not ended: with no loaded weights, the layer gets its own tensors back
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
    except Exception as error:  # the hub raises a dozen kinds
        raise ManifestInvalid(f"the checkpoint {model_config.model} is not on this host: {error}") from error
    return Path(found)
