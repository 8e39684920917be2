"""Digests of a source's tensors, taken in this process, one tensor at a time. Nothing is offered.

For comparing a checkpoint with the digests that engines report: in the engine's dtypes, as a publisher would offer it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from liveweight.devices.kernels import Kernels
from liveweight.devices.memory import Memory
from liveweight.plan.digests import plan_digests
from liveweight.spec.digest import to_hex
from liveweight.spec.layout import packed
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.trainer.offers.freeze import offered_manifest
from liveweight.trainer.sources.host_tensor import HostTensor
from liveweight.trainer.sources.source import Source, check_tensor, one_pass
from liveweight.trainer.sources.tensors import AnyTensor, torch_dtypes


def digest_source(
    source: Source, expected: Manifest, kernels: Kernels, names: Collection[str] | None = None
) -> Manifest:
    """The source's tensors in the dtypes in which they would be offered, with digests; with `names`, digests of those alone."""
    import torch

    own = source.manifest()
    offered, specs = offered_manifest(own, expected), []
    with torch.no_grad():
        tensors = one_pass(source, [spec.name for spec in own])
        for have, spec, tensor in zip(own, offered, tensors, strict=True):
            check_tensor(have, tensor)
            wanted = names is None or not set(names).isdisjoint(spec.names)
            specs.append(_digested(spec, tensor, kernels) if wanted else spec)
            del tensor  # its pages may be those of a file that is about to be closed
    return Manifest(tensors=tuple(specs))


def _digested(spec: TensorSpec, tensor: AnyTensor, kernels: Kernels) -> TensorSpec:
    rows = plan_digests(packed([spec])).rows
    lanes = kernels.bind_digest(rows, [_cast(spec, tensor)], 1).run(0, len(rows))
    return msgspec.structs.replace(spec, digest=to_hex(lanes[0]))


def _cast(spec: TensorSpec, tensor: AnyTensor) -> Memory:
    """The tensor as it would be offered, in host memory."""
    if isinstance(tensor, HostTensor):
        return Memory.from_array(tensor.cast(spec.dtype))
    cast = tensor.to(device="cpu", dtype=torch_dtypes()[spec.dtype]).contiguous()
    return Memory.of_view(cast, writable=False)
