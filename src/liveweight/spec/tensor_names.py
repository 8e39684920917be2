"""Tensor names: a tensor's name without the wrappers around its module.

Owns the wrappers' spellings and the refusal of adapter tensors. Which tensors a source has is in trainer/sources.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from liveweight.errors import ManifestInvalid

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that torch.compile, FSDP1 and activation checkpointing put between a module and its name."""

DATA_PARALLEL_PREFIX = "module."
"""What DistributedDataParallel and DataParallel put before every name. A model may have a child of that name, so a name alone does not
say whether a wrapper put it there."""

PEFT_PREFIX = "base_model.model."
PEFT_LAYER = "base_layer"
"""Where PEFT keeps the model, and the layer that an adapter wraps."""

ADAPTERS = frozenset(
    {
        *("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
        *("ia3_l", "vera_A", "vera_B", "vera_lambda_b", "vera_lambda_d"),
        *(
            "hada_w1_a",
            "hada_w1_b",
            "hada_w2_a",
            "hada_w2_b",
            "lokr_w1",
            "lokr_w2",
            "oft_R",
            "boft_R",
            "boft_s",
        ),
    }
)
"""Components under which PEFT's tuners keep their own tensors; merging adds them to the base layer's."""

COPIES = frozenset({"modules_to_save", "original_module"})
"""Components under which PEFT keeps a trained copy of a module beside the original."""


def clean(name: str) -> str:
    """The name without wrappers; ManifestInvalid for a tensor that belongs to an adapter."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    check_no_adapter(name, parts)
    bare = ".".join(parts).removeprefix(PEFT_PREFIX).split(".")
    inner = [part for at, part in enumerate(bare) if part != PEFT_LAYER or at in (0, len(bare) - 1)]
    return ".".join(inner)


def check_no_adapter(name: str, parts: Iterable[str]) -> None:
    """Refuse a name that leads through an adapter."""
    for part in parts:
        if part in ADAPTERS:
            raise ManifestInvalid(
                f"{name} belongs to an adapter ({part}), and engines take whole weights: publish the PEFT "
                "module itself, whose LoRA is merged on the way; of a sharded or a shared one, call merge_adapter() before every publish"
            )
        if part in COPIES:
            raise ManifestInvalid(
                f"{name} is one of two copies of a module ({part}): publish the PEFT module itself, of which the active copy is taken, "
                "or a state dict that has that copy under the module's own name"
            )


def clean_all(names: Iterable[str]) -> list[str]:
    """All names without wrappers, in order; ManifestInvalid, with both originals, where two become one."""
    originals: dict[str, str] = {}
    for name in names:
        other = originals.setdefault(clean(name), name)
        if other is not name:
            raise ManifestInvalid(f"{other} and {name} are both called {clean(name)} without their wrappers")
    return list(originals)


def find_expected(name: str, expected: Container[str]) -> str:
    """The expected name that a name which comes alone stands for: itself, or without wrappers, `module.` of DDP included.

    A name that stands for none comes back as it is; ManifestInvalid for one of an adapter's tensors.
    """
    found = name if name in expected else clean(name)
    while found not in expected and found.startswith(DATA_PARALLEL_PREFIX):
        found = clean(found.removeprefix(DATA_PARALLEL_PREFIX))
    return found if found in expected else name


def without_data_parallel(names: Sequence[str], expected: Container[str] | None) -> Sequence[str]:
    """Clean names without the `module.` of DDP, where only names are known (a state dict, an iterator).

    The prefix goes only if every name has it. If the engine's names are known (`expected`), it also goes only if not one of the names is
    among them as it is and one of them is without the prefix: a model's own child called `module` keeps its name. Otherwise the names come
    back unchanged, so that an error shows what was offered.
    """
    found = names
    while found and all(name.startswith(DATA_PARALLEL_PREFIX) for name in found):
        if expected is not None and any(name in expected for name in found):
            return found
        found = clean_all(name.removeprefix(DATA_PARALLEL_PREFIX) for name in found)
        if expected is None:
            return found
    return found if expected is not None and any(name in expected for name in found) else names
