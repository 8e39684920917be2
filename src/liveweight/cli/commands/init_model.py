"""`liveweight init-model`: a checkpoint directory with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def init_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; new or empty.")],
    arch: Annotated[
        Literal["qwen3", "qwen3_moe"], typer.Option(help="Dense or mixture of experts.")
    ] = "qwen3",
    size: Annotated[
        Literal["tiny", "small", "1b"], typer.Option(help="About 0.3 M, 30 M or 1 B parameters.")
    ] = "tiny",
    mtp: Annotated[bool, typer.Option("--mtp", help="Add an MTP layer, for speculative decoding.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "float32",
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Head and embedding are one tensor.")] = True,
) -> None:
    """Write an HF checkpoint directory with random weights and a working tokenizer.

    For example: liveweight init-model ./model --size small --dtype bfloat16
    """
    from liveweight.engine.init_model.checkpoint import init_model as write
    from liveweight.engine.init_model.sizes import SIZES

    count = write(directory, SIZES[arch][size], mtp=mtp, tied=tied, dtype=dtype, seed=seed)
    print(f"{directory}: {arch}, {count / 1e6:.1f} M parameters in {dtype}")
